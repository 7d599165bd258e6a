"""Turn EQUAL into UNVERIFIED if it proves nothing: all values are zero, or a graph has a race.

Also add remarks about races and about calls whose values were not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import RACES, Judgement, reasons_against, with_details
from bitproof.harness.records import Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def substance(judgement: Judgement, run: CaseRun) -> Judgement:
    """Turn EQUAL or CLOSE into UNVERIFIED if the agreement proves nothing, for example because all gradients are zero.

    Other verdicts are kept: a difference is evidence in any case.
    """
    if judgement.verdict != Verdict.CLOSE and run.comparison.verdict != Verdict.EQUAL:
        return judgement
    if judgement.verdict == Verdict.NONDETERMINISTIC:  # says more
        return judgement
    return judgement.unverified("\n".join(reasons_against(run.comparison)))


def races(judgement: Judgement, run: CaseRun) -> Judgement:
    """Turn EQUAL or CLOSE into UNVERIFIED if a graph has races. For NONDETERMINISTIC, add the races to the error.

    A race is a read of a collective's output, or a write to its input, before the graph waits for the collective.
    """
    text = with_details(RACES, run.races)
    if judgement.verdict in (Verdict.EQUAL, Verdict.CLOSE):
        return judgement.unverified(text)
    return judgement.with_error(text) if judgement.verdict == Verdict.NONDETERMINISTIC else judgement


def races_beside(judgement: Judgement, run: CaseRun) -> Judgement:
    """If the systems differ and no call was blamed, add a remark for each race in a graph, as a possible cause."""
    first = judgement.first_divergence
    if first is not None and first.call is None:
        run.remarks += [f"a graph races, which may be the cause: {race}" for race in run.races]
    return judgement


def uncompared(judgement: Judgement, run: CaseRun) -> Judgement:
    """Add a remark with the number of the graph's calls whose values are in no record."""
    if run.graph is not None:
        from bitproof.harness.localize.every_call import describe_uncompared

        run.remarks.append(describe_uncompared(run.case, run.graph.calls_uncompared, run.graph.calls))
    return judgement
