"""Compare each system with itself: run it again with the same settings, and again under stress (with random sleeps).

A case is NONDETERMINISTIC if a system differs from itself: then its difference from another system proves nothing.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import Judgement, Repeat, with_repeats
from bitproof.harness.errors import BitproofError
from bitproof.harness.localize.logs.replay import SPARE_BYTES, Replay
from bitproof.harness.options import LOGS_STEP
from bitproof.harness.records import ROLES, Comparison, Divergence, Key, Role

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def control(judgement: Judgement, run: CaseRun) -> Judgement:
    """Run each system a second time, unless it has already run twice, and compare the second run with the first."""
    first = run.comparison.first_divergence
    if run.runs_twice:
        run.control_steps = _steps_of_control(run, first)
        if run.options.control in LOGS_STEP and not run.watches and first:
            run.begin_explaining()
            key = Key(first.step, first.kind, first.name, first.rank)  # with its values kept, a search replays nothing
            run.watches["control"] = Replay(step=first.step, log=True, record=key, spare=SPARE_BYTES)
        # A second run may exist already: it was made early, or for the comparison of layouts.
        done = {repeat.side for repeat in run.repeats}
        run.repeats += [Repeat(role, False, _control(run, role)) for role in ROLES if role not in done]
    return with_repeats(judgement, run.case, run.comparison, run.repeats)


def stress(judgement: Judgement, run: CaseRun) -> Judgement:
    """Run each system again under stress (with random sleeps), and compare this run with the system's first run."""
    found = [Repeat(role, True, run.repeat("stress", role)) for role in ROLES]
    run.repeats += found
    # Only the new repetitions, as `control` has judged its own.
    return with_repeats(judgement, run.case, run.comparison, found)


def _steps_of_control(run: CaseRun, first: Divergence | None) -> int:
    all_steps = run.case.steps
    # With an injected fault, all steps: the fault may take effect after the first difference.
    if run.options.control != "up_to_difference" or first is None or run.options.inject is not None:
        return all_steps
    if (steps := first.step + 1) < all_steps:
        run.remarks.append(f"second runs took {steps} of {all_steps} steps: those up to the first difference")
    return steps


def _control(run: CaseRun, role: Role) -> Comparison:
    try:
        return run.repeat("control", role)
    except BitproofError as error:
        if "control" not in run.watches:
            raise
        text = f"a second run of {role} {getattr(run.case, role)} failed while its calls were logged, and was made"
        run.remarks.append(f"{text} again without: {error.what}")
        # A log changes what a step costs in memory, for example, so the failure may be the log's own.
        run.watches.clear()
        shutil.rmtree(run.archives, ignore_errors=True)
        return run.repeat("control", role)
