"""One tensor on disk: a JSON header line, then the elements' bytes in row-major order. No pickle."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from harness.capture.digest import tensor_bytes
from harness.capture.dtypes import DTYPES, dtype_name
from harness.errors import RecordingError

HEADER_BYTES = 4096


def save_value(path: Path, tensor: torch.Tensor) -> None:
    """Write a dense tensor; the file appears whole or not at all."""
    header = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.write(tensor_bytes(tensor))
    partial.replace(path)


def load_value(path: Path) -> torch.Tensor:
    """Read a tensor back on the CPU. Raises RecordingError naming the file when it is missing or damaged."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(HEADER_BYTES))
            dtype, shape = _header(header)
            content = bytearray(file.read())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"{path} holds no tensor", found=f"{type(error).__name__}: {error}") from error
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise RecordingError(
            f"{path} is cut short or too long",
            expected=f"{math.prod(shape) * dtype.itemsize} bytes of {dtype_name(dtype)} of shape {shape}",
            found=f"{len(content)} bytes",
        )
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


def _header(header: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = DTYPES[header["dtype"]], tuple(header["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return dtype, shape
