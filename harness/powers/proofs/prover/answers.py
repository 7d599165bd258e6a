"""Compares two graphs as data, and answers for each output whether it is proved equal.

1. Each call's value becomes a term, such as `neg(x)`. The terms of both graphs are in the same table.
2. An output is PROVED if it has the same term in both graphs, and this term depends on a parameter and on an input.
3. An output is REFUSED if it is constant, or depends on an unsupported call.
4. Any other output is NOT PROVED. Its terms differ, but its bits may still be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bitproof.harness.powers.proofs.prover.canonical import Canonicalizer
from bitproof.harness.powers.proofs.prover.explain import FirstDifferences, explain, row_splits
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.proof_data import Graph, Tensor, terms_in
from bitproof.harness.powers.proofs.prover.rules import RULES
from bitproof.harness.powers.proofs.prover.terms import Rule, Table

PROVED, NOT_PROVED, REFUSED = "PROVED", "NOT PROVED", "REFUSED"

DIFFERS, NO_RULE = "differs on an input tried", "no rule proves them equal"
"""The two meanings of NOT PROVED: the output had different bits for some input that was tried, or for none."""

PARAMETER, BUFFER, INPUT = "parameter ", "buffer ", "input "
"""Prefixes of the names of a graph's inputs."""

LAID_OUT_OTHERWISE = "equal values, laid out otherwise in memory, which what follows the step may depend on"
SHOWN_OUTPUTS = 3

MUST_READ = (PARAMETER, INPUT)
"""Prefixes of input names. A proved output must depend on an input with each of these prefixes."""


@dataclass(frozen=True)
class OutputAnswer:
    """The answer for an output: PROVED, NOT PROVED (no rule proves it equal) or REFUSED (no answer is possible).

    - `terms`: (index of the output's term in the reference, index in the candidate). Both are indices in the proof's
      table; -1 if unknown.
    - `reason`: why the output is REFUSED.
    - `finding`: for a NOT PROVED output, the calls at which the two graphs first differ.
    - `layouts`: for a PROVED output, its strides in both graphs if these differ.
    - `witness`: how the output's values in the two graphs differed, computed from the same inputs.
    - `agreed`: the number of sets of inputs for which these two values were equal.
    """

    output: str
    verdict: str
    terms: tuple[int, int] = (-1, -1)
    reason: str | None = None
    finding: FirstDifferences | None = None
    layouts: tuple[str, str] | None = None
    witness: str | None = None
    agreed: int = 0

    @property
    def meaning(self) -> str | None:
        """A phrase for a NOT PROVED output: either its values were seen to differ, or no rule proves them equal.

        None for other outputs.
        """
        if self.verdict != NOT_PROVED:
            return None
        if self.witness:
            return DIFFERS
        tried = f"they agreed on every input tried ({self.agreed})" if self.agreed else "no input was tried"
        return f"{NO_RULE}; {tried}"


@dataclass(frozen=True)
class Proof:
    """The answers for all outputs of two graphs.

    - `table`: the terms of both graphs.
    - `sides`: (calls of the reference with their terms, calls of the candidate with their terms).
    - `row_splits`: the operators that one graph calls on all rows, and the other graph on each half of the rows.
    - `reads_something`: False if all outputs are PROVED and none depends on an input.
    """

    answers: tuple[OutputAnswer, ...]
    table: Table
    sides: tuple[Canonicalizer, Canonicalizer]
    row_splits: tuple[str, ...] = ()
    reads_something: bool = True

    def count(self, verdict: str) -> int:
        return sum(answer.verdict == verdict for answer in self.answers)

    @property
    def laid_out_otherwise(self) -> list[str]:
        """The names of the PROVED outputs whose strides differ between the two graphs.

        Later code may depend on the strides.
        """
        return [answer.output for answer in self.answers if answer.verdict == PROVED and answer.layouts]

    @property
    def verdict(self) -> str:
        """The verdict on all outputs together: the worst verdict of any output.

        From worst to best, verdicts are REFUSED, NOT PROVED and PROVED. Without any output, the verdict is REFUSED.
        """
        if not self.answers or self.count(REFUSED):
            return REFUSED
        return NOT_PROVED if self.count(NOT_PROVED) else PROVED


def prove_graphs(
    reference: Graph,
    candidate: Graph,
    rules: dict[str, list[Rule]] | None = None,
    must_read: Sequence[str] = MUST_READ,
    table: Table | None = None,
) -> Proof:
    """Prove two graphs of the same step, output by output.

    - `rules`: rules to use instead of RULES, for tests.
    - `must_read`: prefixes of input names. For each prefix, a PROVED output must depend on an input with this prefix.
    - `table`: a table to which the terms are added. The rules of this table then apply instead of `rules`.
    """
    table = Table(RULES if rules is None else rules) if table is None else table
    sides = Canonicalizer(table, reference, 0), Canonicalizer(table, candidate, 1)
    for side in sides:
        side.run()
    outputs = [*_outputs(sides)]
    terms = [_terms_of(sides, pair) for _, pair in outputs]
    # Every name starts with "", so the last bit says whether a term reads any input at all.
    reads = _reads_of(table, (*must_read, ""))
    answers = [
        _answer(must_read, reads, sides, name, pair, found) for (name, pair), found in zip(outputs, terms, strict=True)
    ]
    # Row splits only explain why an output is NOT PROVED.
    parted = any(answer.verdict == NOT_PROVED for answer in answers)
    reads_something = any(x.verdict != PROVED or reads[x.terms[0]] >> len(must_read) & 1 for x in answers)
    return Proof(tuple(answers), table, sides, row_splits(*sides) if parted else (), reads_something)


def _reads_of(table: Table, kinds: Sequence[str]) -> list[int]:
    # Bit i of a term's mask is 1 if the term depends on an input whose name begins with `kinds[i]`.
    found: list[int] = []
    for step in table.steps:
        bits = 0
        if step.term[0] == "input":
            bits = sum(1 << i for i, kind in enumerate(kinds) if step.term[1].startswith(kind))
        # A rewritten term never occurs in another term, so its kinds are not needed.
        for place in () if step.rule else terms_in(step.term):
            bits |= found[place]  # a term's parts precede it
        found.append(bits)
    return found


Pair = tuple[int | None, int | None]
"""The index of the call that computes an output in each graph; None if a graph has no such output."""


def _outputs(sides: tuple[Canonicalizer, Canonicalizer]) -> Iterable[tuple[str, Pair]]:
    # Outputs are the return values, and `written NAME` for each input NAME that the step writes in place. A graph may
    # also return an output of this name.
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
        # A graph that both returns and writes this name has two candidates for the output, so it gets none: REFUSED.
        twice = any(name in returned[side] and name in written[side] for side in (0, 1))
        yield name, (None, None) if twice else (both[0], both[1])


def _terms_of(sides: tuple[Canonicalizer, Canonicalizer], pair: Pair) -> tuple[int, int] | RefusedError:
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
    # The rules may be too weak to make equal values one term, so this is NOT PROVED rather than DIFFERENT.
    if terms[0] != terms[1]:
        return OutputAnswer(name, NOT_PROVED, terms, finding=explain(*sides, pair[0], pair[1]))
    for bit, kind in enumerate(must_read):
        if not reads[terms[0]] >> bit & 1:
            return OutputAnswer(name, REFUSED, terms, reason=f"it reads no {kind}of the step, so it shows nothing")
    one, other = _layout(sides[0].graph.calls[pair[0]].value), _layout(sides[1].graph.calls[pair[1]].value)
    return OutputAnswer(name, PROVED, terms, layouts=None if one == other else (one, other))


def meaning_of(proof: Proof) -> str:
    """Return a clause about the NOT PROVED outputs: how many were seen to differ, and how many no rule proves equal.

    For example, "; 2 differ on an input tried".
    """
    differ = sum(answer.witness is not None for answer in proof.answers)
    others = [answer for answer in proof.answers if answer.meaning and not answer.witness]
    lines = [f"{differ} {'differs' if differ == 1 else 'differ'} on an input tried"] if differ else []
    lines += [f"of {len(others)} {others[0].meaning}"] if others else []
    return "".join(f"; {part}" for part in lines)


def _layout(x: Any) -> str:
    if not isinstance(x, Tensor):
        return "a number"
    numbers = zip(x.shape, x.strides, strict=True)
    # For example `strides [8, -, ?]`: a dim of size 1 has `-`, a data-dependent stride is `?`.
    strides = ["?" if not isinstance(s, int) else "-" if n == 1 else str(s) for n, s in numbers]
    return f"strides [{', '.join(strides)}]"


def answer_lines(proof: Proof, *, all_in: str) -> list[str]:
    """Return lines about the outputs that are not PROVED, and about PROVED outputs with different strides.

    Outputs that first differ at the same calls share a line. `all_in` is where the complete list is, such as "--json".
    """
    lines = []
    if otherwise := [answer for answer in proof.answers if answer.output in proof.laid_out_otherwise]:
        lines.append(f"  {LAID_OUT_OTHERWISE} ({len(otherwise)}):")
        for answer in otherwise[:SHOWN_OUTPUTS]:
            assert answer.layouts is not None
            lines.append(
                f"    {answer.output}: {answer.layouts[0]} in the reference, {answer.layouts[1]} in the candidate"
            )
        if len(otherwise) > SHOWN_OUTPUTS:
            lines.append(f"    and {len(otherwise) - SHOWN_OUTPUTS} more; {all_in} lists them")
    # Nearly all outputs of a step differ if one call does, so outputs with the same first difference are grouped.
    alike: dict[tuple[str, ...], list[OutputAnswer]] = {}
    for answer in proof.answers:
        if answer.verdict != PROVED:
            found = answer.finding.lines() if answer.finding else []
            alike.setdefault((answer.verdict, answer.meaning or answer.reason or "", *found), []).append(answer)
    for (verdict, reason, *found), (first, *rest) in [*alike.items()][:SHOWN_OUTPUTS]:
        others = f", and {len(rest)} more" if rest else ""
        lines.append(f"  {first.output}{others}: {verdict}" + (f": {reason}" if reason else ""))
        lines += [f"    seen to differ: {first.witness}"] if first.witness else []
        lines += [f"    {line}" for line in found]
    if len(alike) > SHOWN_OUTPUTS:
        count = sum(len(answers) for answers in [*alike.values()][SHOWN_OUTPUTS:])
        lines.append(f"  and {count} more; {all_in} lists them")
    return lines
