"""Questions about a layout as data, and what each view operator shows."""

from __future__ import annotations

import functools
from typing import Any

import torch

from harness.certificate.data import Tensor
from harness.prove.windows import Window, row_major, window

LINE = 64
"""Bytes to which memory is aligned where it is allocated, and beyond which no kernel asks."""

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Bytes of an element. Of any other dtype alignment is counted in elements, which tells more apart than bytes do."""


def alignment_of(dtype: str, offset: int) -> int:
    """Where in a line of memory a tensor begins that has `offset` elements before it."""
    return offset * _ITEM_BYTES.get(dtype, 1) % LINE


def overlaps(x: Tensor) -> bool:
    """Whether two indices may mean one element: told by strides, which must grow past all that smaller ones reach."""
    if any(not isinstance(n, int) for n in (*x.shape, *x.strides)):
        return not _is_dense(x)
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor with sizes that depend on data is contiguous: such sizes stand in its first dim alone."""
    inner = x.shape[1:]
    if not all(isinstance(n, int) for n in inner) or not all(isinstance(s, int) for s in x.strides):
        return False
    return x.strides == row_major((1, *inner))


def is_contiguous(x: Tensor) -> bool:
    """Whether a tensor whose sizes are numbers lies in memory in row-major order."""
    return 0 in x.shape or all(s == r for n, s, r in zip(x.shape, x.strides, row_major(x.shape), strict=True) if n != 1)


def expanded(shape: tuple[int, ...], to: tuple[int, ...]) -> Window:
    """The window that repeats a tensor of `shape` to one of shape `to`, as operands are."""
    strides = [0 if n == 1 else s for n, s in zip(shape, row_major(shape), strict=True)]
    return window(to, [0] * (len(to) - len(shape)) + strides, 0)


def _plain(value: Any) -> Any:
    """A view's argument as torch takes it."""
    match value:
        case ("list", *items):
            return [_plain(item) for item in items]
        case ("bool", text):
            return text == "True"
        case ("none",):
            return None
    return value


@functools.lru_cache(maxsize=1 << 16)
def windows_of(op: str, shape: tuple[int, ...], given: tuple[tuple[str, Any], ...]) -> list[Window]:
    """What a view shows of a tensor of `shape`: torch's own answer, for a contiguous one without memory."""
    namespace, name, overload = op.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name.removesuffix("_copy")), overload)
    values = {key: _plain(value) for key, value in given}
    found = operator(torch.empty(shape, device="meta"), **values)
    views = found if isinstance(found, (list, tuple)) else [found]
    return [window(view.shape, view.stride(), view.storage_offset()) for view in views]
