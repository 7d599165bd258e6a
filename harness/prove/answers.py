"""What is concluded of each output, from two graphs as data.

1. Both graphs' calls become terms of one table.
2. Outputs are those that the step returns, and every input that either graph writes.
3. An output is PROVED where both sides' terms are one, and read a parameter and an input of the step: a constant is
   equal to itself and shows nothing, so it is REFUSED. It is REFUSED where either side is not understood.
4. Every other is NOT PROVED, which says nothing of its bits but that these rules do not make them one term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bitproof.harness.certificate.data import Graph, Tensor, terms_in
from bitproof.harness.prove.canonical import Canonicalizer
from bitproof.harness.prove.explain import FirstDifferences, explain, row_splits
from bitproof.harness.prove.graphs.export import RefusedError
from bitproof.harness.prove.rules import RULES
from bitproof.harness.prove.terms import Rule, Table

PROVED, NOT_PROVED, REFUSED = "PROVED", "NOT PROVED", "REFUSED"

PARAMETER, BUFFER, INPUT = "parameter ", "buffer ", "input "
"""Prefixes of the names of a graph's inputs."""

MUST_READ = (PARAMETER, INPUT)
"""Kinds of inputs; a proved output must depend on at least one of each."""


@dataclass(frozen=True)
class OutputAnswer:
    """One output: its verdict, the places of its terms, why it was refused, where its sides part, and, of one that is
    PROVED, how the two lie in memory where they lie otherwise. `witness` says of one that is NOT PROVED how its sides
    were seen to differ on equal inputs."""

    output: str
    verdict: str
    terms: tuple[int, int] = (-1, -1)
    reason: str | None = None
    finding: FirstDifferences | None = None
    layouts: tuple[str, str] | None = None
    witness: str | None = None


@dataclass(frozen=True)
class Proof:
    """All outputs' answers, and what they rest on. `sides` are the two graphs' terms, reference first.

    `reads_something` is False where all outputs are PROVED and none reads an input."""

    answers: tuple[OutputAnswer, ...]
    table: Table
    sides: tuple[Canonicalizer, Canonicalizer]
    row_splits: tuple[str, ...] = ()
    reads_something: bool = True

    def count(self, verdict: str) -> int:
        """How many outputs got a verdict."""
        return sum(answer.verdict == verdict for answer in self.answers)

    @property
    def laid_out_otherwise(self) -> list[str]:
        """The outputs that are PROVED and whose two sides lie otherwise in memory: what follows may tell them apart."""
        return [answer.output for answer in self.answers if answer.verdict == PROVED and answer.layouts]

    @property
    def verdict(self) -> str:
        """PROVED where all outputs are; else REFUSED where one is, or there are none; else NOT PROVED."""
        if not self.answers or self.count(REFUSED):
            return REFUSED
        return NOT_PROVED if self.count(NOT_PROVED) else PROVED


def prove_graphs(
    reference: Graph,
    candidate: Graph,
    rules: dict[str, list[Rule]] | None = None,
    must_read: Sequence[str] = MUST_READ,
) -> Proof:
    """Compare two graphs of one step. `rules` are the project's own unless a test wants others.

    A proved output is made of inputs of each kind of `must_read`, which are beginnings of inputs' names.
    """
    table = Table(RULES if rules is None else rules)
    sides = Canonicalizer(table, reference, 0), Canonicalizer(table, candidate, 1)
    for side in sides:
        side.run()
    outputs = [*_outputs(sides)]
    terms = [_terms_of(sides, pair) for _, pair in outputs]
    reads = _reads_of(table, (*must_read, ""))
    answers = [
        _answer(must_read, reads, sides, name, pair, found) for (name, pair), found in zip(outputs, terms, strict=True)
    ]
    parted = any(answer.verdict == NOT_PROVED for answer in answers)
    reads_something = any(x.verdict != PROVED or reads[x.terms[0]] >> len(must_read) & 1 for x in answers)
    return Proof(tuple(answers), table, sides, row_splits(*sides) if parted else (), reads_something)


def _reads_of(table: Table, kinds: Sequence[str]) -> list[int]:
    """For each term of a table, the kinds of inputs that it depends on, a bit each. Nobody reads what was rewritten."""
    found: list[int] = []
    for step in table.steps:
        bits = 0
        if step.term[0] == "input":
            bits = sum(1 << i for i, kind in enumerate(kinds) if step.term[1].startswith(kind))
        for place in () if step.rule else terms_in(step.term):
            bits |= found[place]  # a term's own terms stand before it
        found.append(bits)
    return found


Pair = tuple[int | None, int | None]
"""The call that gives an output on either side; None where a side has no such output."""


def _outputs(sides: tuple[Canonicalizer, Canonicalizer]) -> Iterable[tuple[str, Pair]]:
    """Every output's name, and the calls that give it. What an input holds in the end may be returned, too: a graph
    without writes gives it as an output of the name that it has where it is written."""
    returned = [dict(side.graph.outputs) for side in sides]
    inputs = [
        {f"written {call.name}": i for i, call in enumerate(side.graph.calls) if call.op in ("input", "constant")}
        for side in sides
    ]
    written = [[f"written {side.graph.calls[i].name}" for i in side.written_inputs()] for side in sides]
    names = [*returned[0], *returned[1], *written[0], *written[1]]
    for name in dict.fromkeys(names):
        both = [
            returned[side].get(name, inputs[side].get(name)) if name not in written[side] else inputs[side][name]
            for side in (0, 1)
        ]
        twice = any(name in returned[side] and name in written[side] for side in (0, 1))
        yield name, (None, None) if twice else (both[0], both[1])


def _terms_of(sides: tuple[Canonicalizer, Canonicalizer], pair: Pair) -> tuple[int, int] | RefusedError:
    """An output's terms, or why it has none."""
    places = []
    for side, index in zip(sides, pair, strict=True):
        if index is None:
            return RefusedError("one of the two graphs has no such output", where="the graphs' outputs")
        try:
            places.append(side.output(index))
        except RefusedError as error:
            return error
    return places[0], places[1]


def _answer(
    must_read: Sequence[str],
    reads: Sequence[int],
    sides: tuple[Canonicalizer, Canonicalizer],
    name: str,
    pair: Pair,
    terms: tuple[int, int] | RefusedError,
) -> OutputAnswer:
    if None in pair:
        return OutputAnswer(name, REFUSED, reason="one of the two graphs has no such output")
    if isinstance(terms, RefusedError):
        return OutputAnswer(name, REFUSED, reason=f"{terms.what}, in {terms.where}")
    assert pair[0] is not None and pair[1] is not None
    if terms[0] != terms[1]:
        return OutputAnswer(name, NOT_PROVED, terms, finding=explain(*sides, pair[0], pair[1]))
    for bit, kind in enumerate(must_read):
        if not reads[terms[0]] >> bit & 1:
            return OutputAnswer(name, REFUSED, terms, reason=f"it reads no {kind}of the step, so it shows nothing")
    one, other = _layout(sides[0].graph.calls[pair[0]].value), _layout(sides[1].graph.calls[pair[1]].value)
    return OutputAnswer(name, PROVED, terms, layouts=None if one == other else (one, other))


def _layout(x: Any) -> str:
    """How a tensor lies in memory, in words, as far as sizes are numbers; dims of size 1 lie anyhow."""
    if not isinstance(x, Tensor):
        return "a number"
    numbers = zip(x.shape, x.strides, strict=True)
    strides = ["?" if not isinstance(s, int) else "-" if n == 1 else str(s) for n, s in numbers]
    return f"strides [{', '.join(strides)}]"
