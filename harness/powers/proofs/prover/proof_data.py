"""A proof as data: two graphs, their terms, and the certificate.

Everything consists of nested tuples of numbers and strings, so it can be written as JSON. An argument of a call is

    a whole number | ("bool", "True") | ("none",) | ("float", hexadecimal) | ("str" | "dtype" | "device" | "enum", text)
    ("node", index of a call) | ("list", argument, ...) | ("graph", nested graph)
    ("ranks", (rank, ...), ...)                   a process group: the ranks of each of its instances, in order

A size is a whole number, or ("size", (coefficient, symbol, ...), ...): a sum of products of symbols. An earlier call
defines each symbol.

A term describes a value. Other terms refer to it by its index among all steps. Within terms, a symbol is replaced by
the index of the term that defines it. A term is

    ("input", name, dtype, shape)                 a graph's input; no two share memory
    ("constant", digest, dtype, shape)            a tensor that is part of a graph
    ("number", dtype, text)                       a scalar, as a float's hexadecimal form
    ("op", operator, arguments, dtype, shape)     an operator's result; tensors among its arguments are
                                                  ("tensor", term, dtype, device, shape, strides, alignment in bytes);
                                                  a size of its result that depends on data is None, and dtype and
                                                  shape of several results are None
    ("move", operator, arguments, dtype, shape)   the same, for an operator whose result does not depend on layouts:
                                                  tensors among its arguments are ("value", term)
    ("out", term, index, dtype, shape)            a result of an operator with several results
    ("view", term, shape, strides, offset)        elements of a term, counted in row-major order
    ("cat", terms, dim)                           terms, one after the other along a dim
    ("exact", operator, dtype, device, terms)     element by element; all terms have the result's shape
    ("gather", term, ranks)                       every rank's term, along a new first dim
    ("reduce", term, operation, ranks)            on rank i of W ranks, the sum over the ranks of row i of a term that
                                                  has the shape (W, n)
    ("item", term)                                a number read from a tensor
    ("rows", sizes)                               the sum of sizes
    ("extent", term, index)                       a data-dependent size of an operator's result: the index counts the
                                                  dims of all its results
    ("draws", term)                               the generator's state after a random call; ("seed",) at the start
    ("fresh", graph, call, dtype, shape)          uninitialized memory
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

SIDES = ("reference", "candidate")

FLOATS = ("float64", "float32", "bfloat16", "float16")
"""The real dtypes that exact operators may have."""

WHOLE = ("int64", "int32")
"""The integer dtypes that exact operators may have."""

ROOTS = ("parameter ", "input ")
"""Prefixes of graphs' input names; a proved output must read an input of each kind."""

STATE, WRITTEN = "optimizer ", "written "
"""Name prefixes: of an input that is optimizer state, which only a whole step has; of an output that is an input's
final value."""

Term = tuple[Any, ...]
Size = Any
"""An integer, or ("size", ...)."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's layout. Tensors with the same `storage` share memory; storages are numbered within a graph."""

    dtype: str
    device: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    storage: int

    @functools.cached_property
    def is_closed(self) -> bool:
        """Whether no size and no stride of the tensor, nor its offset, depends on data."""
        return all(isinstance(n, int) for n in (*self.shape, *self.strides, self.offset))


@dataclass(frozen=True)
class Call:
    """A call of a graph, such as `aten.mm.default` with its arguments by name.

    - `writes`: the names of the arguments that the call writes.
    - `random`: whether it draws random numbers.
    - `value`: the layout of its result. A tuple for several results, a size for a number read from a tensor, None
      without a result.
    - `place`: the call's origin, for readers.

    A call that returns a view is recorded with the operator "view". Arguments that only repeat what the layouts state
    are left out, such as the dims of a transpose.
    """

    name: str
    op: str
    args: tuple[tuple[str, Any], ...]
    value: Any
    writes: tuple[str, ...] = ()
    random: bool = False
    place: tuple[Any, ...] = ()

    @functools.cached_property
    def reads(self) -> list[int]:
        """The indices of the calls whose results this call reads, in the order of its arguments."""
        return [index for _, value in self.args for index in nodes_in(value)]

    @functools.cached_property
    def results(self) -> list[Tensor]:
        """The layouts of the tensors among the call's results."""
        return [x for x in (self.value if isinstance(self.value, tuple) else (self.value,)) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class Graph:
    """A step's calls in execution order, inputs first; `outputs` has each output's name and the index of its call."""

    calls: tuple[Call, ...]
    outputs: tuple[tuple[str, int], ...]

    @functools.cached_property
    def is_whole_step(self) -> bool:
        """Whether an optimizer's state is among the graph's inputs. A constant with such a name does not count."""
        return any(call.op == "input" and call.name.startswith(STATE) for call in self.calls)


@dataclass(frozen=True, slots=True)
class ProofStep:
    """A term of the proof. `equals` is the index of the term to which `rule` rewrote it; without a rule, its own index.

    `hint` is an intermediate result of the rule, for the checker.
    """

    term: Term
    rule: str
    equals: int
    hint: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The subject of a certificate: the case file's text, the command's options, and versions.

    `code` is the SHA-256 of bitproof's own source files; `outputs` has the names of the step's return values.
    """

    case: str
    code: str
    torch: str
    machine: str
    outputs: tuple[str, ...]
    extra_passes: tuple[str, ...] = ()
    precompiled: int = 0


@dataclass(frozen=True)
class Certificate:
    """All that a checker reads. `case` is the case's name, `answers` has (output, verdict) for each output.

    `subject` is None only in tests, for two graphs without a case.
    """

    case: str
    reference: Graph
    candidate: Graph
    steps: tuple[ProofStep, ...]
    answers: tuple[tuple[str, str], ...]
    assumptions: tuple[str, ...] = ()
    subject: Subject | None = None


def nodes_in(argument: Any) -> list[int]:
    """Return the indices of the calls that an argument refers to: [3, 5] for ("list", ("node", 3), ("node", 5))."""
    kind = argument[0] if type(argument) is tuple and argument else None
    if kind == "node":
        return [argument[1]]
    return [index for item in argument[1:] for index in nodes_in(item)] if kind == "list" else []


def terms_in(value: Any) -> list[int]:
    """Return the indices of the terms that a term, or a part of a term, refers to, in order."""
    match value:
        case ("view" | "gather" | "reduce" | "item" | "extent" | "draws" | "value" | "out" | "tensor", place, *rest):
            return [place, *terms_in(("list", *rest))] if value[0] == "tensor" else [place]
        case ("cat", places, _) | ("exact", _, _, _, places):
            return list(places)
        case ("op" | "move", _, arguments, _, shape):
            return [place for x in (*(x for _, x in arguments), shape) if type(x) is tuple for place in terms_in(x)]
        case ("size", *products):
            return [place for _, *places in products for place in places]
        case tuple() if value[:1] != ("graph",):
            return [place for item in value if type(item) is tuple for place in terms_in(item)]
    return []
