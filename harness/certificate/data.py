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

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FORMAT = 2

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

    @functools.cached_property
    def reads(self) -> list[int]:
        """The calls that it reads, in the order of its arguments."""
        return [index for _, value in self.args for index in nodes_in(value)]


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
    """A term, and what it was rewritten to: `equals` is the place in the table, the term's own where it stays.

    `hint` is what a rule's arithmetic found, so that a checker need not search.
    """

    term: Term
    rule: str
    equals: int
    hint: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What was concluded of one output. `terms` are its places in the table on either side, -1 for none."""

    output: str
    verdict: str
    terms: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class Certificate:
    """All that a checker needs. `steps` are those of each call, the reference's first: a term's place in the table is
    its number among all of them."""

    case: str
    reference: Graph
    candidate: Graph
    steps: tuple[tuple[Step, ...], ...]
    answers: tuple[Answer, ...]
    assumptions: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def num_steps(self) -> int:
        """How many steps there are, those of all calls together."""
        return sum(map(len, self.steps))


def nodes_in(argument: Any) -> list[int]:
    """The calls that an argument refers to, in order."""
    if not isinstance(argument, tuple) or not argument:
        return []
    if argument[0] == "node":
        return [argument[1]]
    return [index for item in argument[1:] for index in nodes_in(item)] if argument[0] == "list" else []


def terms_in(value: Term) -> list[int]:
    """The places of the terms that a term refers to, in order."""
    match value:
        case ("view" | "out" | "gather" | "reduce" | "item" | "extent" | "draws" | "value" | "tensor", place, *rest):
            return [place, *_symbols_in(rest)]
        case ("cat", places, _) | ("exact", _, _, _, places):
            return list(places)
        case ("op" | "move", _, arguments, _, shape):
            return [place for _, x in arguments for place in terms_in(x)] + _symbols_in(shape)
        case ("list", *items):
            return [place for x in items for place in terms_in(x)]
        case ("rows", _) | ("size", *_):
            return _symbols_in(value)
    return []


def _symbols_in(sizes: Any) -> list[int]:
    """The terms that sizes are made of."""
    if not isinstance(sizes, (tuple, list)):
        return []
    if sizes and sizes[0] == "size":
        return [symbol for _, *symbols in sizes[1:] for symbol in symbols]
    return [symbol for size in sizes if isinstance(size, tuple) for symbol in _symbols_in(size)]


def reads_of(terms: Iterable[Term], kinds: Sequence[str]) -> list[int]:
    """For each term of a table, which kinds of inputs it is made of: bit i is `kinds[i]`, which names begin with."""
    found: list[int] = []
    for term in terms:
        bits = sum(1 << i for i, kind in enumerate(kinds) if term[0] == "input" and term[1].startswith(kind))
        for place in terms_in(term):
            bits |= found[place]  # a term's own terms stand before it
        found.append(bits)
    return found
