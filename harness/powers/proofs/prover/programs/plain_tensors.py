"""Builds tensors over the bytes of an untrusted file. A tensor that would reach outside these bytes is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST = 1 << 48
"""The maximum number of elements that sizes and strides may span. No memory has as many.

It is small enough that products of such numbers do not overflow.
"""

MOST_DIMS = 64

DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
"""Dtypes by their numbers in torch's schema."""


class TensorError(ValueError):
    """A tensor reaches outside its memory, or is larger than any memory."""


def refuse_layout(sizes: Sequence[Any], strides: Sequence[Any], offset: Any, where: str) -> None:
    """Raise TensorError for a layout that no tensor has, such as a negative stride. `where` names the tensor in errors.

    A size that is not an int is a symbol for any number from 0 on.
    """
    numbers = [x for x in (*sizes, *strides, offset) if isinstance(x, int)]
    if len(sizes) != len(strides) or len(sizes) > MOST_DIMS or any(not 0 <= x <= LARGEST for x in numbers):
        raise TensorError(f"{where} has sizes, strides or an offset that no tensor has")
    num = span = 1
    for size, stride in zip(sizes, strides, strict=True):
        num *= size if isinstance(size, int) else 1
        span += (size - 1) * stride if isinstance(size, int) and isinstance(stride, int) and size else 0
    if max(num, span) > LARGEST:
        raise TensorError(f"{where} has more elements than any memory")


def memory_of(content: memoryview | bytes, dtype: torch.dtype, where: str) -> Tensor:
    """Return a 1-d tensor over a copy of these bytes. Raises TensorError if the bytes are not valid elements."""
    if len(content) % dtype.itemsize:
        raise TensorError(f"{where} has {len(content)} bytes, which are no elements of {dtype}")
    # Kernels may assume that the byte of a truth value is 0 or 1.
    if dtype is torch.bool and bytes(content).translate(None, b"\0\1"):
        raise TensorError(f"{where} has truth values that are neither 0 nor 1")
    if not content:
        return torch.empty(0, dtype=dtype)
    # `clone` allocates memory with torch's alignment, which a buffer of Python may lack.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().view(dtype)


def with_layout(memory: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int, where: str) -> Tensor:
    """Return a view of `memory` with these sizes and strides.

    Raises TensorError if the view would reach past the end of `memory`.
    """
    refuse_layout(sizes, strides, offset, where)
    is_empty = 0 in sizes
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not is_empty and last >= memory.numel():
        raise TensorError(f"{where} needs {last + 1} elements, and the file has {memory.numel()}")
    return memory.as_strided(list(sizes), list(strides), offset if not is_empty else 0)
