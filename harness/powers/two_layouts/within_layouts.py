"""The check that makes the verdict CLOSE if two systems with different layouts differ within the measured bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import Judgement
from bitproof.harness.powers.two_layouts.layout_verdict import (
    decide_by_layout,
    first_beyond,
    remark_without_call,
    remarks_on,
)
from bitproof.harness.records import Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def layouts(judgement: Judgement, run: CaseRun) -> Judgement:
    """Apply the measured bounds to the verdict on two systems with different layouts.

    If operator calls of the two systems cannot be paired, a remark names the module and direction of the difference.
    """
    assert run.across is not None, "only of two layouts"
    found, remarks = run.across.layouts, list[str]()
    if not run.comparison.layout_mismatches:
        verdict, text = decide_by_layout(found)
        # The first tensor beyond its bound, rather than the first that differs at all.
        first = first_beyond(found, run.comparison) or judgement.first_divergence
        judgement = replace(judgement, verdict=verdict, first_divergence=first)
        judgement = judgement.with_error(text) if text else judgement
    if judgement.verdict == Verdict.CLOSE:
        remarks = remarks_on(found)
    # If a control differs no bound is measured, and the first record that differs may do so by rounding.
    elif judgement.first_divergence and (found.samples or not found.regrouped) and not run.has_partners:
        remarks = [remark_without_call(judgement.first_divergence)]
    return replace(judgement, remarks=(*judgement.remarks, *remarks))
