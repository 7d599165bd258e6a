"""The data of the mixing analysis: the dim of a value that holds the chunked rows (`Rows`), and calls with rows."""

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
    """A division of the rows into `count` adjacent ranges, one per rank.

    For example, 8 rows on 2 ranks are viewed as (2, 4), and rank 1 selects (4,): rows 4 to 7.

    `form` states how a value holds the divided rows:

    - "cut": all rows, with a dim that numbers the ranges before the dim of the rows.
    - "one": the rows of this rank's range. `index` is the range's number.
    - "cut summand": like "cut", with zeros for the rows of other ranks.
    - "summand": all rows in a single dim, with zeros for the rows of other ranks. The sum over ranks has all rows.

    `outer` and `inner` are the `Rows` fields before the division.
    """

    form: Literal["cut", "one", "cut summand", "summand"]
    count: Any
    outer: Any
    inner: Any
    index: Node | None = None


@dataclass(frozen=True)
class Rows:
    """The dim of a value that holds the rows. A row is all elements at an index of the chunked dim, whose size is n.

    - `outer`, `inner`: the dim's size is `outer` * n * `inner`. For example, (B, n, D) viewed as (B * n, D) has `outer`
      B and `inner` 1. Both are None for rows that arrived by an all-to-all.
    - `order`: the rearrangements of rows that have not been undone, first to last.
    - `share`: set if the value has only a rank's rows, or the rows in two dims.
    """

    dim: int
    outer: Any = 1
    inner: Any = 1
    order: tuple[Any, ...] = ()
    share: SharedRows | None = None


@dataclass(frozen=True)
class RuleCall:
    """A call, with the dims that hold rows in its arguments, and the arguments that are known to be permutations.

    `permutations` maps each permutation to (the sort that computed it, whether it is the inverse of that sort).
    """

    node: Node
    symbol: sympy.Symbol
    rows: dict[Node, Rows]
    permutations: dict[Node, tuple[Node, bool]]

    @cached_property
    def given(self) -> dict[str, Any]:
        """All arguments by name, including defaults."""
        declared = schema_of(self.node.target).arguments
        defaults = {a.name: a.default_value for a in declared}
        return defaults | dict(zip(defaults, self.node.args, strict=False)) | self.node.kwargs

    @property
    def first(self) -> Node:
        """The first argument."""
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def result_rank(self) -> int:
        """The number of dims of the call's result, or of the first of several results."""
        value = self.node.meta["val"]
        return (value[0] if isinstance(value, (tuple, list)) else value).dim()

    def of(self, x: Any) -> Rows | None:
        """Return the `Rows` of an argument; None if none of its dims holds rows, or if it is not a node."""
        return self.rows.get(x) if isinstance(x, Node) else None

    def dims(self, name: str, rank: int) -> set[int]:
        """Return the dims that the argument `name` lists, counted from 0; all dims if it is None or an empty list.

        `rank` is the number of dims of the value to which the dims belong.
        """
        found = self.given.get(name)
        listed = [found] if isinstance(found, int) else list(found or range(rank))
        return {dim % rank for dim in listed} if rank else set()


def sizes_of(node: Node) -> list[Any]:
    """Return a value's sizes as expressions."""
    return [symbols.expression(size) for size in node.meta["val"].shape]


def rank_of(node: Node) -> int:
    """Return a value's number of dims."""
    rank: int = node.meta["val"].dim()
    return rank
