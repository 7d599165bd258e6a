"""Collectives over named groups, for eager and traced code. Each function launches the collective and waits for it.

In eager, the method of the group is called directly if possible, which takes half the time of torch's operator.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bitproof.harness.torch_distributed import flat_collectives, group_named
from bitproof.harness.torch_operators import is_watched
from bitproof.reference.parallel.rank_order_group import RankOrderGroup
from bitproof.reference.parallel.reporting_group import ReportingGroup

_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Concatenate every rank's `x` (N, ...) along dim 0 in rank order. Returns (size * N, ...)."""
    if (own := _own_group(x, group)) is None:
        return _ops.wait_tensor(_ops.all_gather_into_tensor(x, size, group))
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    flat_collectives(own)[0](gathered, x).wait()
    return gathered


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum `x` (size * N, ...) over ranks, and return this rank's N rows. On gloo, the sum is in rank order."""
    if (own := _own_group(x, group)) is None:
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", size, group))
    rows = x.new_empty(x.shape[0] // size, *x.shape[1:])
    flat_collectives(own)[1](rows, x).wait()
    return rows


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of every rank's `x`. On gloo, the sum is in rank order."""
    if (own := _own_group(x, group)) is None:
        return _ops.wait_tensor(_ops.all_reduce(x, "sum", group))
    # The group's method sums in place, but the functional operator returns a new tensor.
    total = x.clone(memory_format=torch.contiguous_format)
    own.allreduce([total]).wait()
    return total


def all_to_all(x: Tensor, output_splits: list[int], input_splits: list[int], group: str) -> Tensor:
    """Send `input_splits[i]` rows of `x` to rank i, and receive `output_splits[i]` rows from it.

    Returns the received rows.
    """
    if (own := _own_group(x, group)) is None:
        return _ops.wait_tensor(_ops.all_to_all_single(x, output_splits, input_splits, group))
    received = x.new_empty(sum(output_splits), *x.shape[1:])
    own.alltoall_base(received, x, output_splits, input_splits).wait()
    return received


def _own_group(x: Tensor, name: str) -> dist.ProcessGroup | None:
    """Return the group whose methods can be called directly for `x`; None if torch's operator must be called."""
    # The operator calls the group's method through the dispatcher, autograd and torch's registry of pending work.
    # It is needed if a mode, a trace, a profiler or autograd has to see it, and outside of host memory.
    if is_watched() or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
        return None
    found = group_named(name)
    return found if isinstance(found, (RankOrderGroup, ReportingGroup)) else None
