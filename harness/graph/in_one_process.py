"""Collectives of all ranks, computed in a single process. A value is a list with an entry per rank.

Reductions add in the group's order. For ranks 0 to 2, the sum is (x0 + x1) + x2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.graph.groups import Partition


class NotEvaluatedError(Exception):
    """A call cannot be computed for all ranks in one process, such as a random draw or an unknown collective."""


def collective(op: str, partition: Partition, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the result of a collective for each rank, in the order of ranks.

    - `op`: the operator's name, such as `_c10d_functional.all_reduce.default`.
    - `partition`: the ranks of each instance of the group.
    - `arguments`: for each rank, its tensor and its other arguments, without the group.

    Raises NotEvaluatedError for an unknown collective.
    """
    found: list[Any] = [None] * len(arguments)
    for group in partition:
        xs = [arguments[rank][0] for rank in group]
        for place, rank in enumerate(group):
            # `op` is like _c10d_functional.all_reduce.default.
            found[rank] = _result_of_rank(op.split(".")[1], xs, [arguments[peer][1:] for peer in group], place)
    return found


def _result_of_rank(name: str, xs: list[Tensor], rest: list[Sequence[Any]], place: int) -> Tensor:
    match name:
        case "all_gather_into_tensor":
            return torch.cat(xs)
        case "reduce_scatter_tensor":
            return reduced([x.chunk(len(xs))[place] for x in xs], rest[place][0])
        case "all_reduce":
            return reduced(xs, rest[place][0])
        case "all_to_all_single":
            return torch.cat([x.split(list(sizes))[place] for x, (_, sizes) in zip(xs, rest, strict=True)])
    raise NotEvaluatedError(name)


def reduced(xs: Sequence[Tensor], operation: str) -> Tensor:
    """Return the sum or the average of `xs`, which are added in their order. `operation` is "sum" or "avg"."""
    if operation not in ("sum", "avg"):
        raise NotEvaluatedError(f"a reduction by {operation}")
    # A copy, as a sum over a single rank would be its input itself.
    total = functools.reduce(torch.add, xs).clone()
    return total / len(xs) if operation == "avg" else total
