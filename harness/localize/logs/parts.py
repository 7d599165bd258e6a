"""What calls left in parts of a storage: memory that is read whole may have been filled piece by piece.

So DistributedDataParallel fills a bucket, by views that no later call is given, and then exchanges it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Geometry(NamedTuple):
    """Which elements of a storage a tensor has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One more than the last of them."""
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class Parts:
    """By storage, which calls left something in parts of it."""

    def __init__(self, digest: Callable[[Tensor], str]) -> None:
        self._digest = digest
        self._left: dict[int, dict[_Geometry, tuple[str, int]]] = defaultdict(dict)

    def leave(self, storage: int, tensor: Tensor, value: str, index: int) -> None:
        """Note what a call has left in a tensor, unless that is all of its storage."""
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes:
            geometry = _Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            self._left[storage][geometry] = value, index

    def inside(self, storage: int, tensor: Tensor) -> list[int]:
        """The calls that left something in a tensor that still is there: storages come again, and are written."""
        known = self._left.get(storage, {})
        if not known or not tensor.is_contiguous():
            return []
        begin = int(tensor.storage_offset())
        parts = [part for part in known if begin <= part.offset and part.end <= begin + tensor.numel()]
        return [known[part][1] for part in parts if self._digest(tensor.as_strided(*part)) == known[part][0]]
