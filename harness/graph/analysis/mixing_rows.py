"""Where the chunked elements of a value are, and what a rule is told of a call that reads some."""

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
    """Rows that ranks share: `count` adjacent runs of them, of which each rank takes the one that `index` says.

    "cut": all rows, run by run, in the dim before that of the rows; "one": those of one run; "cut summand" and
    "summand": all rows again, but zeros in place of the other runs', until ranks have added theirs. `outer` and `inner`
    are those of all rows.
    """

    form: Literal["cut", "one", "cut summand", "summand"]
    count: Any
    outer: Any
    inner: Any
    index: Node | None = None


@dataclass(frozen=True)
class Rows:
    """Which dim of a value holds the chunked elements, one in each place or a flattened run of them.

    Its size is `outer` * n * `inner`, n the chunk symbol; both are None for rows that all-to-alls have delivered.
    `order` is what has rearranged them and has not been undone, first to last. `share` says that not all are here, or
    not in one dim.
    """

    dim: int
    outer: Any = 1
    inner: Any = 1
    order: tuple[Any, ...] = ()
    share: SharedRows | None = None


@dataclass(frozen=True)
class RuleCall:
    """A call, the rows of its arguments, and which arguments are known to be permutations.

    A permutation is (the sort that made it, whether it is the inverse of that).
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
        """Dims of the result, of the first result of several."""
        value = self.node.meta["val"]
        return (value[0] if isinstance(value, (tuple, list)) else value).dim()

    def of(self, x: Any) -> Rows | None:
        """Where the rows of an argument are."""
        return self.rows.get(x) if isinstance(x, Node) else None

    def dims(self, name: str, rank: int) -> set[int]:
        """A dim, or dims, given by this name; all of them for None or an empty list."""
        found = self.given.get(name)
        listed = [found] if isinstance(found, int) else list(found or range(rank))
        return {dim % rank for dim in listed} if rank else set()


def sizes_of(node: Node) -> list[Any]:
    """A value's sizes as expressions."""
    return [symbols.expression(size) for size in node.meta["val"].shape]


def rank_of(node: Node) -> int:
    """How many dims a value has."""
    rank: int = node.meta["val"].dim()
    return rank
