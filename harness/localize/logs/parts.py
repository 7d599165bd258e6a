"""Remember which calls wrote the parts of a piece of memory that is later read as a whole.

For example, DistributedDataParallel fills a bucket through a view for each gradient, and then all-reduces the bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Geometry(NamedTuple):
    """The elements of a storage that a tensor covers: its shape, strides and offset, counted in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """Return one more than the largest index, within the storage, of these elements."""
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class Parts:
    """The parts that calls have written, by storage: the index of the call and the digest of the value of each part."""

    def __init__(self, digest: Callable[[Tensor], str]) -> None:
        self._digest = digest
        self._left: dict[int, dict[_Geometry, tuple[str, int]]] = defaultdict(dict)

    def leave(self, storage: int, tensor: Tensor, value: str, index: int) -> None:
        """Note that call `index` wrote a value into `tensor`, if `tensor` is only a part of its storage.

        `value` is the digest of the value.
        """
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes:
            geometry = _Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            self._left[storage][geometry] = value, index

    def inside(self, storage: int, tensor: Tensor) -> list[int]:
        """Return the indices of the calls that wrote a part of a tensor which still has the written value."""
        known = self._left.get(storage, {})
        if not known or not tensor.is_contiguous():
            return []
        # A contiguous tensor covers a range of its storage, so a part is inside if its first and last elements are.
        begin = int(tensor.storage_offset())
        parts = [part for part in known if begin <= part.offset and part.end <= begin + tensor.numel()]
        # Values are compared again, because the storage's address may have been reused, or the part overwritten.
        return [known[part][1] for part in parts if self._digest(tensor.as_strided(*part)) == known[part][0]]
