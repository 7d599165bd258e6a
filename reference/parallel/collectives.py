"""Functional collectives over named groups, each launched and waited for on the spot.

Eager and traced code share these calls, so both issue the same collectives, and a traced graph shows
launch and wait side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Concatenate every rank's `x` (N, ...) along dim 0 in rank order: (size * N, ...)."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum `x` (size * N, ...) over ranks, in rank order on gloo, and keep this rank's N rows."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", size, group))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's `x`, in rank order on gloo."""
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", group))


def all_to_all(x: Tensor, output_splits: list[int], input_splits: list[int], group: str) -> Tensor:
    """Send `input_splits[i]` rows of `x` to rank i; receive `output_splits[i]` rows from it, in rank order."""
    return _ops.wait_tensor(_ops.all_to_all_single(x, output_splits, input_splits, group))
