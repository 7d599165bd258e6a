"""Make the result of a case from a judgement, from an error, or from an interruption."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.compare.verdict import Judgement
from bitproof.harness.consistency import contradiction
from bitproof.harness.errors import (
    MAX_FACT,
    MAX_TRACEBACK,
    BitproofError,
    MachineError,
    RankError,
    RecordingError,
    bounded,
)
from bitproof.harness.records import CaseResult, Verdict

MAX_ERROR = 2 * MAX_TRACEBACK
"""The most characters of a result's error: room for a message, a traceback, and text from a search for the cause."""


def result_of(case: Case, judgement: Judgement, *, device: str, backend: str, **facts: Any) -> CaseResult:
    """Return the result of a judged case. `facts` are the remaining fields of CaseResult: losses, seconds, passes,
    memory.

    If numbers in the result contradict its verdict, the verdict becomes UNVERIFIED, and the result states why.
    """
    # A judgement's fields have the names of CaseResult's.
    judged = {name: getattr(judgement, name) for name in judgement.__dataclass_fields__}
    result = _result(case, device=device, backend=backend, **judged, **facts)
    if found := contradiction(result):
        text = (
            f"the verdict {result.verdict} is withdrawn, as {found.field} is {found.found}, expected {found.expected}"
        )
        result.verdict, result.error = Verdict.UNVERIFIED, "\n".join(filter(None, (result.error, text)))
    return result


def result_of_error(case: Case, error: BaseException, *, device: str, backend: str, **facts: Any) -> CaseResult:
    """Return the result of a case that failed: UNVERIFIED after a RecordingError or MachineError, ERROR after any
    other.
    """
    text = (
        str(error) if isinstance(error, BitproofError) else f"{type(error).__name__}: {bounded(str(error), MAX_FACT)}"
    )
    if isinstance(error, RankError) and error.traceback:
        text += f"\n\n{error.traceback}"
    # A damaged recording or a failing machine says nothing about the systems.
    verdict = Verdict.UNVERIFIED if isinstance(error, (RecordingError, MachineError)) else Verdict.ERROR
    return _result(case, verdict=verdict, error=text, device=device, backend=backend, **facts)


def complete(cases: Iterable[Case], results: Iterable[CaseResult], reason: str) -> list[CaseResult]:
    """Return a result for every case, in the order of `cases`. A case that is not in `results` is UNVERIFIED for
    `reason`.
    """
    found = {result.case.name: result for result in results}
    return [
        found.get(case.name)
        or _result(case, verdict=Verdict.UNVERIFIED, error=reason, device="unknown", backend="unknown")
        for case in cases
    ]


def _result(case: Case, *, error: str | None = None, **facts: Any) -> CaseResult:
    facts["error"] = error if error is None else bounded(error, MAX_ERROR)
    return CaseResult(case=case, steps=case.steps, world_size=case.parallelism.world_size, **facts)
