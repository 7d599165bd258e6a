"""Convert a tensor to bytes and back: a line of JSON, then the elements' bytes in row-major order. Uses no pickle."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import torch

from bitproof.harness.capture.digest import tensor_bytes
from bitproof.harness.capture.dtypes import DTYPES, dtype_name
from bitproof.harness.errors import RecordingError

HEADER_BYTES = 4096


def pack_value(tensor: torch.Tensor) -> bytes:
    """Return a line of JSON followed by a dense tensor's bytes. Raises RecordingError if the tensor has no memory of
    its own.
    """
    return _header_line(tensor.dtype, tensor.shape) + tensor_bytes(tensor)


@functools.lru_cache(maxsize=4096)
def _header_line(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return json.dumps({"dtype": dtype_name(dtype), "shape": list(shape)}).encode() + b"\n"


def unpack_value(packed: bytes, where: str) -> torch.Tensor:
    """Convert the bytes from `pack_value` back to a tensor on the CPU. Raises RecordingError, naming `where`, if they
    are damaged.
    """
    header, _, content = packed.partition(b"\n")
    try:
        dtype, shape = _header(json.loads(header[:HEADER_BYTES]))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"{where} holds no tensor", found=f"{type(error).__name__}: {error}") from error
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise RecordingError(
            f"{where} is cut short or too long",
            expected=f"{math.prod(shape) * dtype.itemsize} bytes of {dtype_name(dtype)} of shape {shape}",
            found=f"{len(content)} bytes",
        )
    # `frombuffer` refuses an empty buffer.
    if not content:
        return torch.empty(shape, dtype=dtype)
    # A copy, as a tensor must not share the memory of immutable bytes.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def _header(header: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = DTYPES[header["dtype"]], tuple(header["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return dtype, shape
