"""The data of a proof: two graphs, the terms of their values, and the certificate.

All data are nested tuples of numbers and strings, so that they can be written as JSON. An argument of a call is one of:

    a whole number | ("bool", "True") | ("none",) | ("float", hexadecimal) | ("str" | "dtype" | "device" | "enum", text)
    ("node", index of a call) | ("list", argument, ...) | ("graph", nested graph)
    ("ranks", (rank, ...), ...)                   a process group: the ranks of each of its instances, in order

A size is a whole number, or a sum of products of symbols: ("size", (2, "u0", "u1"), (3, "u2")) is 2 * u0 * u1 + 3 * u2.
Each symbol is defined by an earlier call.

A term describes a value. A term refers to another term by the index of its step in the proof. Within a term, a symbol
is replaced by the index of the term that defines the symbol. A term is one of:

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
"""The floating-point dtypes that the operands of an "exact" term may have."""

WHOLE = ("int64", "int32")
"""The integer dtypes that the operands of an "exact" term may have."""

ROOTS = ("parameter ", "input ")
"""Prefixes of the names of a graph's inputs. A proved output must depend on an input with each prefix."""

STATE, WRITTEN = "optimizer ", "written "
"""`STATE` begins the name of an input that is optimizer state.

Only a graph with the optimizer's update has such inputs. `WRITTEN` begins the name of an output that is the final value
of an input.
"""

Term = tuple[Any, ...]
Size = Any
"""An integer, or ("size", ...) as the module's docstring describes it."""


@dataclass(frozen=True)
class Tensor:
    """The layout of a tensor. Tensors of a graph share memory if their `storage` numbers are equal."""

    dtype: str
    device: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    storage: int

    @functools.cached_property
    def is_closed(self) -> bool:
        """Whether all sizes and strides and the offset are plain numbers, so that none depends on data."""
        return all(isinstance(n, int) for n in (*self.shape, *self.strides, self.offset))


@dataclass(frozen=True)
class Call:
    """A call in a graph, such as `aten.mm.default` with its arguments by name.

    - `value`: the layout of the result. A tuple of layouts for several results, a size for a number read from a tensor,
      None if the call returns nothing.
    - `writes`: the names of the arguments whose memory the call writes.
    - `random`: whether the call draws random numbers.
    - `place`: where the call came from, for reports: module, direction, chunk and source line.

    A call that returns a view has the operator "view". Arguments that follow from the layouts are left out, such as the
    dims of a transpose.
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
        """The indices of the calls whose results are arguments of this call, in the arguments' order."""
        return [index for _, value in self.args for index in nodes_in(value)]

    @functools.cached_property
    def results(self) -> list[Tensor]:
        return [x for x in (self.value if isinstance(self.value, tuple) else (self.value,)) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class Graph:
    """The calls of a step in execution order, inputs first.

    `outputs` has (name of the output, index of the call that computes the output).
    """

    calls: tuple[Call, ...]
    outputs: tuple[tuple[str, int], ...]

    @functools.cached_property
    def is_whole_step(self) -> bool:
        """Whether the step contains the optimizer's update: some input is optimizer state."""
        # A constant may have such a name, too, so its `op` counts.
        return any(call.op == "input" and call.name.startswith(STATE) for call in self.calls)


@dataclass(frozen=True, slots=True)
class ProofStep:
    """A term, and the rule that rewrote the term.

    - `equals`: the index of the step with the rewritten term. If no rule applied (`rule` is ""), the index of this
      step.
    - `hint`: an intermediate result of the rule, so that the checker need not search for it.
    """

    term: Term
    rule: str
    equals: int
    hint: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The subject of a certificate: with it, another process can trace the same graphs again.

    - `case`: the text of the case file.
    - `code`: the SHA-256 of bitproof's own source files.
    - `outputs`: the names of the step's return values.
    - `precompiled`: 1 if the candidate's graph is from a precompiled step, otherwise 0.
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
    """All that the checker of a proof reads.

    - `case`: the name of the case.
    - `answers`: (output, verdict) for each output.
    - `subject`: None only in tests, for two graphs without a case.
    """

    case: str
    reference: Graph
    candidate: Graph
    steps: tuple[ProofStep, ...]
    answers: tuple[tuple[str, str], ...]
    assumptions: tuple[str, ...] = ()
    subject: Subject | None = None


def nodes_in(argument: Any) -> list[int]:
    """Return the indices of the calls to which an argument refers: [3, 5] for ("list", ("node", 3), ("node", 5))."""
    kind = argument[0] if type(argument) is tuple and argument else None
    if kind == "node":
        return [argument[1]]
    return [index for item in argument[1:] for index in nodes_in(item)] if kind == "list" else []


def terms_in(value: Any) -> list[int]:
    """Return the indices of the terms inside a term or a part of a term, in order: [3, 5] for ("cat", (3, 5), 0)."""
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
