"""Proofs in reports: a clause beside the verdict of a case, and a headline if a PROVED case runs DIFFERENT.

In such a case, an assumption of the proof is false on this machine, or something outside the step had an effect.
docs/explanation/proving.md lists all assumptions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.proofs.prover.answers import LAID_OUT_OTHERWISE
from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
from bitproof.harness.records import BlamedCall, CaseResult, Code, Divergence, Finding, Verdict
from bitproof.harness.report import text
from bitproof.harness.validate import read

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
PROVED_KINDS = ("loss", "grad", "buffer")
"""The kinds of records that a proof covers. It does not cover the optimizer's update."""


def clause(found: ProofOutcome) -> str:
    """Return the outcome of a proof in a few words.

    For example, `PROVED (28 laid out otherwise)`, `NOT PROVED (38 of 44)` or `REFUSED`. "Laid out otherwise" are
    outputs with different strides in the two systems.
    """
    if found.verdict == ProofVerdict.PROVED and found.otherwise:
        return f"{found.verdict} ({found.otherwise} laid out otherwise)"
    less = {ProofVerdict.NOT_PROVED: found.not_proved, ProofVerdict.REFUSED: found.refused}.get(found.verdict, 0)
    return f"{found.verdict} ({less} of {found.outputs})" if less else str(found.verdict)


def describe(name: str, found: ProofOutcome, most: int = 3) -> list[str]:
    """Return the outcome of a proof as lines of text. The first line has the counts of outputs.

    Further lines name up to `most` outputs of each kind:

    - outputs that may differ, with the calls at which the first of these outputs differs;
    - PROVED outputs whose strides differ between the two systems.
    """
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


def contradicted(result: CaseResult, found: ProofOutcome, *, injects: bool = False) -> str | None:
    """Return a headline if a case was PROVED but its run differs: the false assumption, and the blamed call.

    None if the run does not contradict the proof, for example because the proof does not cover the difference.
    `injects` is True if the run injected a fault.
    """
    first = result.first_divergence
    if found.verdict != ProofVerdict.PROVED:
        return None
    if result.verdict == Verdict.NONDETERMINISTIC:
        shown = f"; {text.blame(first)}" if text.blame(first) else ""
        return _loud(result, f"kernels are not deterministic here: a system differs from itself{shown}")
    if result.verdict not in (Verdict.DIFFERENT, Verdict.CLOSE) or first is None or first.kind not in PROVED_KINDS:
        return None
    # Code after the first step may depend on the outputs' strides, so a later step may differ without a false proof.
    if found.otherwise and first.step:
        return None
    if injects:
        return _loud(result, f"--inject put in a fault that no proof sees{_blamed(first)}")
    return _loud(result, f"{_false_assumption(first.call)}{_blamed(first)}")


def finding_of(name: str, found: ProofOutcome, headline: str | None) -> Finding:
    lines = describe(name, found) if name else describe("proof", found)
    return Finding(
        brief=clause(found), headline=headline or "", blocks=(Code("proof", "\n".join(lines)),), data=asdict(found)
    )


def proof_of(result: CaseResult) -> ProofOutcome | None:
    """Return the proof in a case's result; None if the run had no `--prove-first`."""
    finding = result.checks.get("proof")
    return None if finding is None else read_data(finding.data)


def read_data(data: dict[str, Any]) -> ProofOutcome:
    """Return the proof in a finding's data. Raises RecordingError if the data are damaged."""
    return read(ProofOutcome, data, "checks.proof.data", RecordingError, damaged="is damaged")


def _loud(result: CaseResult, why: str) -> str:
    return f"{result.case.name}: PROVED EQUAL, YET {result.verdict}: an assumption of the proof is false here: {why}"


def _blamed(first: Divergence) -> str:
    return f"; {text.blame(first)}" if first.call else f"; first at {text.locate(first)}"


def _false_assumption(call: BlamedCall | None) -> str:
    """Return the assumption that must be false if this call is blamed, in the words of docs/explanation/proving.md."""
    if call is None:
        return "both sides run what was traced (no call explains the difference)"
    # Only "same inputs, different output" is about a kernel. Extra, missing or reconnected calls are not in the graphs.
    if call.how is not None and "same inputs" not in call.how:
        return "both sides run what was traced"
    if any(name in call.operator for name in COLLECTIVES):
        return "a collective's bits depend on its group's ranks in order, on sizes, dtypes and values alone"
    return "a kernel's bits depend on its arguments and their values, dtypes, shapes, strides and alignment alone"
