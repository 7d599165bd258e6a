"""Make a case's line in the report from what was judged, from an error, or from an interruption."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.case import Case
from harness.compare.verdict import Judgement
from harness.errors import BitproofError, MachineError, RankError, RecordingError
from harness.records import CaseResult, Verdict


def result_of(case: Case, judgement: Judgement, *, device: str, backend: str, **facts: Any) -> CaseResult:
    """A judged case. `facts` are CaseResult's remaining fields: losses, seconds, passes."""
    judged = {name: getattr(judgement, name) for name in judgement.__dataclass_fields__}
    return _result(case, device=device, backend=backend, **judged, **facts)


def result_of_error(case: Case, error: BaseException, *, device: str, backend: str, **facts: Any) -> CaseResult:
    """A case that failed. RecordingError and MachineError leave it UNVERIFIED, anything else is an ERROR."""
    text = str(error) if isinstance(error, BitproofError) else f"{type(error).__name__}: {error}"
    if isinstance(error, RankError) and error.traceback:
        text += f"\n\n{error.traceback}"
    verdict = Verdict.UNVERIFIED if isinstance(error, (RecordingError, MachineError)) else Verdict.ERROR
    return _result(case, verdict=verdict, error=text, device=device, backend=backend, **facts)


def complete(
    cases: Iterable[Case], results: Iterable[CaseResult], reason: str, *, device: str, backend: str
) -> list[CaseResult]:
    """Every case's result, in case order: one without a result is UNVERIFIED, with `reason`."""
    found = {result.case.name: result for result in results}
    return [
        found.get(case.name) or _result(case, verdict=Verdict.UNVERIFIED, error=reason, device=device, backend=backend)
        for case in cases
    ]


def _result(case: Case, **facts: Any) -> CaseResult:
    return CaseResult(case=case, steps=case.steps, world_size=case.parallelism.world_size, **facts)
