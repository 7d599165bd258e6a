"""A case judged by the checks of the product, on evidence that a test states instead of running systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.compare.verdict import Judgement, Repeat, judgement_of
from bitproof.harness.execute.checks.case_checks import DECIDING, applied
from bitproof.harness.options import ROLES, RunOptions, Stress
from bitproof.harness.records import CaseSeconds, Closeness, Comparison, LayoutBounds, Verdict

BEFORE_REPLAYS = "control", "stress", "bound", "layouts", "substance", "races"
"""The checks that need no replay, which would need systems."""


def judge(
    case: Case,
    comparison: Comparison,
    *,
    reference_control: Comparison | None = None,
    candidate_control: Comparison | None = None,
    closeness: Closeness | None = None,
    layouts: LayoutBounds | None = None,
    have_partners: bool = False,
    reference_stress: Comparison | None = None,
    candidate_stress: Comparison | None = None,
    races: Sequence[str] = (),
) -> Judgement:
    """The judgement of a case before replays. Second runs and measurements give what is passed here; a run under stress
    that is not passed repeats its system, if the other is."""
    controls = dict(zip(ROLES, (reference_control, candidate_control), strict=True))
    stresses = dict(zip(ROLES, (reference_stress, candidate_stress), strict=True))
    run: Any = SimpleNamespace(
        case=case,
        options=RunOptions(control="never", stress=Stress() if any(stresses.values()) else None),
        comparison=comparison,
        repeats=[Repeat(role, False, found) for role, found in controls.items() if found],
        runs_twice=False,
        repeat=lambda arm, role: stresses[role] or Comparison(verdict=Verdict.EQUAL),
        across=layouts and SimpleNamespace(layouts=layouts),
        has_partners=layouts is None or have_partners,
        races=dict.fromkeys(races),
        recordings=lambda: {role: Path(role) for role in ROLES},
        ask=lambda request: closeness,
        seconds=CaseSeconds(),
    )
    judgement = replace(judgement_of(comparison), layouts=layouts)
    return applied({name: DECIDING[name] for name in BEFORE_REPLAYS}, judgement, run)
