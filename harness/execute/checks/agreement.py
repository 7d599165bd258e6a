"""Refuse an EQUAL that is no evidence: values are all zero, a graph races, or a pass's calls have no records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import RACES, Judgement, reasons_against, tell
from bitproof.harness.records import Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def substance(judgement: Judgement, run: CaseRun) -> Judgement:
    """Withdraw an EQUAL or CLOSE that shows nothing, for example because all compared gradients are zero.

    A difference always shows something, so other verdicts are kept.
    """
    if judgement.verdict != Verdict.CLOSE and run.comparison.verdict != Verdict.EQUAL:
        return judgement
    if judgement.verdict == Verdict.NONDETERMINISTIC:  # says more
        return judgement
    return judgement.withdrawn("\n".join(reasons_against(run.comparison)))


def races(judgement: Judgement, run: CaseRun) -> Judgement:
    """Withdraw the EQUAL or CLOSE of a graph that races; list the races if a system differs from itself. A graph races
    if it reads the result of a collective or a copy, or writes its input, before the wait for that call."""
    text = tell(RACES, run.races)
    if judgement.verdict in (Verdict.EQUAL, Verdict.CLOSE):
        return judgement.withdrawn(text)
    return judgement.with_error(text) if judgement.verdict == Verdict.NONDETERMINISTIC else judgement


def races_beside(judgement: Judgement, run: CaseRun) -> Judgement:
    """Mention a graph's races as a possible cause, if systems differ and no call to blame was found."""
    first = judgement.first_divergence
    if first is not None and first.call is None:
        run.remarks += [f"a graph races, which may be the cause: {race}" for race in run.races]
    return judgement


def uncompared(judgement: Judgement, run: CaseRun) -> Judgement:
    """Add a remark that counts the calls of a user's pass whose values no record contains."""
    if run.graph is not None:
        from bitproof.harness.localize.every_call import told_uncompared

        run.remarks.append(told_uncompared(run.case, run.graph.calls_uncompared, run.graph.calls))
    return judgement
