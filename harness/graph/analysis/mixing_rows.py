"""Data of the mixing analysis (mixing.py): which dim of a value holds the chunked rows, and calls with such values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import sympy
from torch.fx import Node

from bitproof.harness.graph import symbols
from bitproof.harness.torch_operators import schema_of


@dataclass(frozen=True)
class SharedRows:
    """A division of the rows into `count` adjacent ranges, one for each rank.

    For example, 8 rows on 2 ranks are viewed as (2, 4), and rank 1 selects rows 4 to 7. `form` states how a value holds
    the rows:

    - "cut": all rows, in two dims: the range's number, and the row's position within the range.
    - "one": only the rows of this rank's range. The node `index` has the range's number.
    - "cut summand": as "cut", but rows of other ranks are zeros.
    - "summand": all rows in a single dim, but rows of other ranks are zeros. The sum over ranks has all rows.

    `outer` and `inner` are copied from the `Rows` that was divided.
    """

    form: Literal["cut", "one", "cut summand", "summand"]
    count: Any
    outer: Any
    inner: Any
    index: Node | None = None


@dataclass(frozen=True)
class Rows:
    """The dim of a value that holds the rows. A row is all elements at an index of the chunked dim, whose size is n.

    - `outer`, `inner`: the size of `dim` is `outer` * n * `inner`. For example, (B, n, D) viewed as (B * n, D) has
      `outer` B and `inner` 1. Both are None if the size is not such a product, as after an all-to-all.
    - `order`: the rearrangements of rows that were not undone, first to last.
    - `share`: the division of the rows among ranks; None if ranks do not divide them.
    """

    dim: int
    outer: Any = 1
    inner: Any = 1
    order: tuple[Any, ...] = ()
    share: SharedRows | None = None


@dataclass(frozen=True)
class RuleCall:
    """A call with the rows of its arguments.

    - `symbol`: the size of the chunked dim.
    - `rows`: argument -> its `Rows`, for arguments with rows.
    - `permutations`: permutation -> (the sort that returned it, whether it is the inverse of that sort).
    """

    node: Node
    symbol: sympy.Symbol
    rows: dict[Node, Rows]
    permutations: dict[Node, tuple[Node, bool]]

    @cached_property
    def given(self) -> dict[str, Any]:
        declared = schema_of(self.node.target).arguments
        defaults = {a.name: a.default_value for a in declared}
        return defaults | dict(zip(defaults, self.node.args, strict=False)) | self.node.kwargs

    @property
    def first(self) -> Node:
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def result_rank(self) -> int:
        value = self.node.meta["val"]
        return (value[0] if isinstance(value, (tuple, list)) else value).dim()

    def of(self, x: Any) -> Rows | None:
        """Return the `Rows` of an argument; None if it has no rows, or is not a node."""
        return self.rows.get(x) if isinstance(x, Node) else None

    def dims(self, name: str, rank: int) -> set[int]:
        """Return the dims that the argument called `name` states, as indices from 0 to `rank` - 1.

        An argument that is None or empty states all dims. `rank` is the number of dims of the value.
        """
        found = self.given.get(name)
        listed = [found] if isinstance(found, int) else list(found or range(rank))
        return {dim % rank for dim in listed} if rank else set()


def sizes_of(node: Node) -> list[Any]:
    return [symbols.expression(size) for size in node.meta["val"].shape]


def rank_of(node: Node) -> int:
    rank: int = node.meta["val"].dim()
    return rank
