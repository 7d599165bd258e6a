"""The checks of a case, in order: each takes the case's result so far and returns it, changed or not.

After the first runs were compared, the checks of DECIDING turn the comparison into a verdict. For example, the check
`control` runs both systems again. If a system differs from itself, `control` turns DIFFERENT into NONDETERMINISTIC. The
checks of REPORTING get the final verdict.

A CaseCheck names its function, which takes `(known, run)`, and has a condition. The function's module is imported only
if the condition holds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bitproof.harness.records import Verdict

if TYPE_CHECKING:
    from bitproof.harness.compare.verdict import Judgement
    from bitproof.harness.execute.case_run import CaseRun

Known = TypeVar("Known")


class CaseCheck(NamedTuple):
    """A check of a case: `source` names its function, and `applies` decides whether the function is called.

    `source` is MODULE:FUNCTION. A module without a dot, as in "cause:every_call", is in this package.
    """

    source: str
    applies: Callable[[Any, CaseRun], bool]

    def __call__(self, known: Known, run: CaseRun) -> Known:
        """Apply the check: `known` is a Judgement before the verdict is final, a CaseResult after it."""
        module, _, function = self.source.partition(":")
        module = module if "." in module else f"{__package__}.{module}"
        after: Known = getattr(importlib.import_module(module), function)(known, run)
        return after


def _is_equal(known: Judgement) -> bool:
    return known.verdict == Verdict.EQUAL


def _has_bound(_: Judgement, run: CaseRun) -> bool:
    return run.case.bound is not None and run.comparison.verdict == Verdict.DIFFERENT


def _may_explain(known: Judgement, run: CaseRun) -> bool:
    return known.first_divergence is not None and known.verdict != Verdict.CLOSE and run.has_partners


def _lacks_calls(known: Judgement, run: CaseRun) -> bool:
    # A user's pass may compute values that are in no record.
    return _is_equal(known) and bool(run.options.extra_passes) and not run.options.every_call


DECIDING = {
    "control": CaseCheck("second_runs:control", lambda _, run: run.runs_twice or bool(run.repeats)),
    "stress": CaseCheck("second_runs:stress", lambda _, run: run.options.stress is not None),
    "bound": CaseCheck("within_bounds:bound", _has_bound),
    "layouts": CaseCheck(
        "bitproof.harness.powers.two_layouts.within_layouts:layouts",
        lambda known, run: run.across is not None and known.verdict == Verdict.DIFFERENT,
    ),
    "substance": CaseCheck(
        "agreement:substance", lambda _, run: bool(run.comparison.vacuous or run.comparison.unshared)
    ),
    "races": CaseCheck("agreement:races", lambda _, run: bool(run.races)),
    "cause": CaseCheck("cause:cause", _may_explain),
    "every_call": CaseCheck("cause:every_call", lambda known, run: _is_equal(known) and run.options.every_call),
    "uncompared": CaseCheck("agreement:uncompared", _lacks_calls),
    "races_beside": CaseCheck("agreement:races_beside", lambda _, run: bool(run.races)),
}
"""The checks that decide the verdict. Order matters: nondeterminism is checked before bounds, and both are checked
before any check turns EQUAL into UNVERIFIED."""

REPORTING = {
    "findings": CaseCheck("findings:with_findings", lambda _, run: bool(run.options.active)),
}
"""The checks of a case whose verdict is final. `findings` runs those with command-line options and those of users."""


def applied(checks: Mapping[str, CaseCheck], known: Known, run: CaseRun) -> Known:
    for check in checks.values():
        if check.applies(known, run):
            known = check(known, run)
    return known
