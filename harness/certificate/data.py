"""Two graphs, the terms that they compute, and what was concluded: as data.

Everything nests tuples of numbers and texts, so that it is JSON as it stands. An argument of a call is

    a whole number | ("bool", "True") | ("none",) | ("float", hexadecimal) | ("str" | "dtype" | "device" | "enum", text)
    ("node", index of a call) | ("list", argument, ...) | ("graph", nested graph)

and a size is a whole number, or ("size", (coefficient, symbol, ...), ...): a sum of products of symbols, each of which
an earlier call defines. A term is one of

    ("input", name, dtype, shape)                 a graph's input; no two share memory
    ("constant", digest, dtype, shape)            a tensor that is part of a graph
    ("op", operator, arguments, dtype, shape)     what an operator computes; tensors among its arguments are
                                                  ("tensor", term, dtype, device, shape, strides, alignment in bytes)
    ("move", operator, arguments, dtype, shape)   the same where layouts do not count: ("value", term)
    ("out", term, index, dtype, shape)            one of an operator's several results
    ("view", term, shape, strides, offset)        elements of a term, counted in row-major order
    ("cat", terms, dim)                           terms, one after the other along a dim
    ("exact", operator, dtype, device, terms)     element by element; all terms have the result's shape
    ("gather", term, ranks)                       every rank's term, along a new first dim
    ("reduce", term, operation, ranks)            row i of (W, n), summed over ranks, on rank i of the W
    ("item", term)                                a number read from a tensor
    ("rows", sizes)                               the sum of sizes
    ("extent", term, index)                       a size that a call's data decide
    ("draws", term)                               the generator's state after a random call; ("seed",) at the start
    ("fresh", graph, call, dtype, shape)          memory that nobody wrote

Terms are referred to by their place in the certificate's table, symbols within terms too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FORMAT = 1

Term = tuple[Any, ...]
Size = Any
"""A whole number, or ("size", ...)."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's layout; `storage` numbers the memory that it lies in, within its graph."""

    dtype: str
    device: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    storage: int


@dataclass(frozen=True)
class Place:
    """Where a call came from. For readers: nothing is concluded from it."""

    module: str | None = None
    direction: str | None = None
    chunk: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Call:
    """One call of a graph: an operator, its arguments by name, those that it writes, whether it draws random numbers.

    `value` is a tensor, several, a size (for a number read from a tensor), or None.
    """

    name: str
    op: str
    args: tuple[tuple[str, Any], ...]
    value: Any
    writes: tuple[str, ...] = ()
    random: bool = False
    place: Place = Place()


@dataclass(frozen=True)
class Graph:
    """Calls in the order in which they run, inputs first; outputs and the process groups by name.

    A group is all its instances, each of which is its ranks in the group's order.
    """

    calls: tuple[Call, ...]
    outputs: tuple[tuple[str, int], ...]
    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()


@dataclass(frozen=True)
class Step:
    """A term, and what it was rewritten to: `equals` is the place in the table, the term's own where it stays."""

    term: Term
    rule: str
    equals: int


@dataclass(frozen=True)
class Answer:
    """What was concluded of one output. `terms` are its places in the table on either side, -1 for none."""

    output: str
    verdict: str
    terms: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class Certificate:
    """All that a checker needs."""

    case: str
    reference: Graph
    candidate: Graph
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...]
    assumptions: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = field(default=())


def terms_in(value: Any) -> list[int]:
    """The places of the terms that a term, or an argument of one, refers to, in order."""
    match value:
        case ("input" | "constant" | "fresh" | "seed", *_) | int() | str():
            return []
        case ("view" | "out" | "gather" | "reduce" | "item" | "extent" | "draws" | "value", term, *_):
            return [term, *_in_sizes(value[2:])]
        case ("tensor", term, _, _, shape, strides, offset):
            return [term, *_in_sizes((shape, strides, offset))]
        case ("cat", terms, _) | ("exact", _, _, _, terms):
            return list(terms)
        case ("op" | "move", _, arguments, _, shape):
            return [place for _, argument in arguments for place in terms_in(argument)] + _in_sizes(shape)
        case ("rows", sizes):
            return _in_sizes(sizes)
        case ("list", *items):
            return [place for item in items for place in terms_in(item)]
        case ("size", *_):
            return _in_sizes(value)
        case _:
            return []


def _in_sizes(value: Any) -> list[int]:
    if isinstance(value, tuple) and value and value[0] == "size":
        return [symbol for _, *symbols in value[1:] for symbol in symbols]
    return [place for item in value for place in _in_sizes(item)] if isinstance(value, tuple) else []
