"""Give systems the verdict CLOSE if their values differ, but by at most the bound that the case states."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bitproof.harness.compare.verdict import Judgement
from bitproof.harness.execute.requests import ClosenessRequest
from bitproof.harness.records import Closeness, Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun

SHARDED_OTHERWISE = (
    "nothing can be compared with the case's bound of {:g}: elements of tensors that are sharded otherwise have no "
    "partners; have both systems show whole tensors, as by DTensor.full_tensor()"
)


def bound(judgement: Judgement, run: CaseRun) -> Judgement:
    """Measure the values of two systems that differ, and apply the case's bound.

    If dtypes or shapes differ, the case stays DIFFERENT. If tensors are sharded in different ways, the case is
    UNVERIFIED.
    """
    case, comparison = run.case, run.comparison
    assert case.bound is not None, "only what has a bound is measured"
    if not comparison.layout_mismatches:
        judgement = replace(judgement, closeness=measure(run))
    # NONDETERMINISTIC says more. Then the measured error is reported, and decides nothing.
    if judgement.verdict != Verdict.DIFFERENT:
        return judgement
    if comparison.is_sharded_otherwise:
        return judgement.unverified(SHARDED_OTHERWISE.format(case.bound))
    if comparison.layout_mismatches:
        return judgement
    return _decided(judgement, case.bound, case.close_within is not None)


def measure(run: CaseRun) -> Closeness:
    """Measure the largest relative error between the reference's and the candidate's recording.

    If the case expects a difference (`differs_within`), only the first step with a difference is measured.
    """
    began, first = time.monotonic(), run.comparison.first_divergence
    step = first.step if first and run.case.differs_within is not None else None
    folders = {role: path.resolve() for role, path in run.recordings().items()}
    assert run.case.bound is not None
    found = run.ask(ClosenessRequest(**folders, bound=run.case.bound, step=step))
    run.seconds.closeness = time.monotonic() - began
    return found


def _decided(judgement: Judgement, bound: float, may_be_close: bool) -> Judgement:
    found = judgement.closeness
    # A measurement against another bound decides nothing.
    if found is None or found.bound != bound:
        return judgement.unverified(f"bits differ, and no values were measured against the case's bound of {bound:g}")
    # A case that expects DIFFERENT stays DIFFERENT within its bound.
    if found.is_within:
        return replace(judgement, verdict=Verdict.CLOSE) if may_be_close else judgement
    key, error = found.first_beyond, found.first_beyond_error
    assert key is not None
    size = "infinite" if error is None else f"{error:.3g}"
    return judgement.with_error(
        f"the relative error of step {key.step}, rank {key.rank}, {key.kind} {key.name} is {size}, beyond the case's "
        f"bound of {bound:g}; {found.tensors_beyond} tensors are beyond it, and this is the first"
    )
