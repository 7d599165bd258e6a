"""`Rows`: the position of the chunked elements in a value. `RuleCall`: a call with its arguments' rows, for a rule."""

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
    """Rows divided between ranks: `count` adjacent ranges; each rank takes the range with number `index`.

    The form is "cut": all rows, with the ranges in a dim before that of the rows; "one": the rows of a single range;
    "cut summand" or "summand": all rows again, with zeros for other ranks' rows until the ranks add theirs. `outer` and
    `inner` are those of all rows. Example: 8 rows on 2 ranks, cut as (2, 4); rank 1 takes (4,), rows 4 to 7.
    """

    form: Literal["cut", "one", "cut summand", "summand"]
    count: Any
    outer: Any
    inner: Any
    index: Node | None = None


@dataclass(frozen=True)
class Rows:
    """The dim of a value that holds the chunked elements, alone or flattened with other dims.

    Its size is `outer` * n * `inner`, where n is the chunk symbol; both are None for rows delivered by all-to-alls.
    For example, (B, n, D) viewed as (B * n, D) has `outer` B and `inner` 1. `order` lists the rearrangements that have
    not been undone, first to last. With a `share`, some rows are missing, or the rows are in two dims.
    """

    dim: int
    outer: Any = 1
    inner: Any = 1
    order: tuple[Any, ...] = ()
    share: SharedRows | None = None


@dataclass(frozen=True)
class RuleCall:
    """A call, the rows of its arguments, and the arguments known to be permutations.

    `permutations` has, for each permutation, its sort and whether it is that sort's inverse.
    """

    node: Node
    symbol: sympy.Symbol
    rows: dict[Node, Rows]
    permutations: dict[Node, tuple[Node, bool]]

    @cached_property
    def given(self) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        declared = schema_of(self.node.target).arguments
        defaults = {a.name: a.default_value for a in declared}
        return defaults | dict(zip(defaults, self.node.args, strict=False)) | self.node.kwargs

    @property
    def first(self) -> Node:
        """The first argument."""
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def result_rank(self) -> int:
        """The number of dims of the result, or of the first of several."""
        value = self.node.meta["val"]
        return (value[0] if isinstance(value, (tuple, list)) else value).dim()

    def of(self, x: Any) -> Rows | None:
        """The rows of an argument."""
        return self.rows.get(x) if isinstance(x, Node) else None

    def dims(self, name: str, rank: int) -> set[int]:
        """The dims that the argument `name` lists, counted from 0; all dims if it is None or an empty list.

        `rank` is the number of dims of the value that it refers to.
        """
        found = self.given.get(name)
        listed = [found] if isinstance(found, int) else list(found or range(rank))
        return {dim % rank for dim in listed} if rank else set()


def sizes_of(node: Node) -> list[Any]:
    """A value's sizes as expressions."""
    return [symbols.expression(size) for size in node.meta["val"].shape]


def rank_of(node: Node) -> int:
    """A value's number of dims."""
    rank: int = node.meta["val"].dim()
    return rank
