"""Proofs in reports: a column next to the verdict, and a prominent line if a proved case differs.

docs/explanation/proving.md lists the assumptions of proofs. If a PROVED case is DIFFERENT, an assumption is false on
that machine, or something outside the step had an effect. The line names the assumption and the call that shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.records import BlamedCall, CaseResult, Divergence, ProofOutcome, ProofVerdict, Report, Verdict
from bitproof.harness.report import text

NOT_TRIED = "not tried"
HEADER = "proof"

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
PROVED_KINDS = ("loss", "grad", "buffer")
"""The kinds of records that proofs cover; the optimizer's update is not covered."""


LAID_OUT_OTHERWISE = "equal values, laid out otherwise in memory, which what follows the step may depend on"


def has_proofs(report: Report) -> bool:
    """Whether a proof was requested, so the column has content."""
    return any(result.proof is not None for result in report.cases)


def column(result: CaseResult) -> str:
    """A proof's outcome: `PROVED (28 laid out otherwise)`, `NOT PROVED (38 of 44)`, `REFUSED`, `not tried`."""
    found = result.proof
    if found is None or found.verdict == ProofVerdict.NOT_TRIED:
        return NOT_TRIED
    if found.verdict == ProofVerdict.PROVED and found.otherwise:
        return f"{found.verdict} ({found.otherwise} laid out otherwise)"
    less = {ProofVerdict.NOT_PROVED: found.not_proved, ProofVerdict.REFUSED: found.refused}.get(found.verdict, 0)
    return f"{found.verdict} ({less} of {found.outputs})" if less else str(found.verdict)


def tell(name: str, found: ProofOutcome, most: int = 3) -> list[str]:
    """A proof's result before the case runs, as lines: how many outputs are proved equal, and which may differ."""
    counts = f"{found.proved} of {found.outputs} outputs" if found.outputs else found.reason or "nothing to prove"
    seconds = "" if found.seconds is None else f", {found.seconds:.1f} s"
    lines = [f"{name}: {found.verdict}: {counts}{seconds}"]
    if found.outputs and found.verdict != ProofVerdict.PROVED:
        more = found.not_proved + found.refused - most
        named = ", ".join(found.unproved[:most]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"  may differ in: {named}")
        lines += [f"    {line}" for line in [*found.first, *([found.reason] if found.reason else [])]]
    if found.otherwise:
        named = ", ".join(found.laid_out_otherwise[:most])
        others = f" and {found.otherwise - most} more" if found.otherwise > most else ""
        lines.append(f"  {LAID_OUT_OTHERWISE}: {named}{others}")
    return lines


def belied(result: CaseResult, options: Sequence[str] = ()) -> str | None:
    """The prominent line about a PROVED case that differs, with the false assumption and the blamed call.

    None if the run confirms the proof, or differs in something that the proof does not cover, such as code after a step
    whose outputs have other strides. `options` are the run's.
    """
    found, first = result.proof, result.first_divergence
    if found is None or found.verdict != ProofVerdict.PROVED:
        return None
    if result.verdict == Verdict.NONDETERMINISTIC:
        shown = f"; {text.blame(first)}" if text.blame(first) else ""
        return _loud(result, f"kernels are not deterministic here: a system differs from itself{shown}")
    if result.verdict not in (Verdict.DIFFERENT, Verdict.CLOSE) or first is None or first.kind not in PROVED_KINDS:
        return None
    if found.otherwise and first.step:
        return None
    if "--inject" in options:
        return _loud(result, f"--inject put in a fault that no proof sees{_blamed(first)}")
    return _loud(result, f"{_false_assumption(first.call)}{_blamed(first)}")


def loudest(report: Report) -> list[str]:
    """The prominent lines of a report, at most one per case."""
    return [line for line in (loudest_of(report, result) for result in report.cases) if line]


def loudest_of(report: Report, result: CaseResult) -> str | None:
    """The prominent line of a case in a report; None if it has none."""
    return belied(result, report.options if result.options is None else result.options)


def _loud(result: CaseResult, why: str) -> str:
    return f"{result.case.name}: PROVED EQUAL, YET {result.verdict}: an assumption of the proof is false here: {why}"


def _blamed(first: Divergence) -> str:
    return f"; {text.blame(first)}" if first.call else f"; first at {text.locate(first)}"


def _false_assumption(call: BlamedCall | None) -> str:
    """The assumption that a blamed call refutes, as docs/explanation/proving.md words it."""
    if call is None:
        return "both sides run what was traced (no call explains the difference)"
    if call.how is not None and "same inputs" not in call.how:
        return "both sides run what was traced"
    if any(name in call.operator for name in COLLECTIVES):
        return "a collective's bits depend on its group's ranks in order, on sizes, dtypes and values alone"
    return "a kernel's bits depend on its arguments and their values, dtypes, shapes, strides and alignment alone"
