"""Agreement that is no evidence: of values that show nothing, of a graph that races, of calls without records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import RACES, Judgement, reasons_against, tell
from bitproof.harness.records import Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def substance(judgement: Judgement, run: CaseRun) -> Judgement:
    """Withdraw agreement that shows nothing, also that of a CLOSE. A difference is never vacuous."""
    if judgement.verdict != Verdict.CLOSE and run.comparison.verdict != Verdict.EQUAL:
        return judgement
    if judgement.verdict == Verdict.NONDETERMINISTIC:  # says more
        return judgement
    return judgement.withdrawn("\n".join(reasons_against(run.comparison)))


def races(judgement: Judgement, run: CaseRun) -> Judgement:
    """Withdraw agreement of a graph that races.

    A graph races if it reads the result of a collective or a copy, or writes its input, before anything waits for it.
    If a system differs from itself, its races are listed beside that.
    """
    text = tell(RACES, run.races)
    if judgement.verdict in (Verdict.EQUAL, Verdict.CLOSE):
        return judgement.withdrawn(text)
    return judgement.with_error(text) if judgement.verdict == Verdict.NONDETERMINISTIC else judgement


def races_beside(judgement: Judgement, run: CaseRun) -> Judgement:
    """Remarks on the races of a graph, if systems differ and no call to blame was found."""
    first = judgement.first_divergence
    if first is not None and first.call is None:
        run.remarks += [f"a graph races, which may be the cause: {race}" for race in run.races]
    return judgement


def uncompared(judgement: Judgement, run: CaseRun) -> Judgement:
    """A remark on the calls of a user's pass whose values no record shows."""
    if run.graph is not None:
        from bitproof.harness.localize.every_call import told_uncompared

        run.remarks.append(told_uncompared(run.case, run.graph.calls_uncompared, run.graph.calls))
    return judgement
