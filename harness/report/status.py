"""The exit status of a run: the worst of its cases, in the order 2, 3, 1, 0."""

from __future__ import annotations

from collections.abc import Iterable

from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.records import BaselineStatus, CaseResult, Score, Verdict

SUCCESS = 0
UNEXPECTED = 1
WRONG_CALL = 2
UNJUDGED = 3

WORST_FIRST = (WRONG_CALL, UNJUDGED, UNEXPECTED, SUCCESS)


def case_status(result: CaseResult) -> int:
    """0 as expected, 3 not judged, by itself, against a baseline or by a check, 1 judged and not as expected."""
    if result.verdict in (Verdict.UNVERIFIED, Verdict.ERROR) or result.sides_with(BaselineStatus.UNVERIFIED):
        return UNJUDGED
    if any(found.unjudged for found in result.checks.values()):
        return UNJUDGED
    return SUCCESS if result.as_expected else UNEXPECTED


def faults_status(score: Score) -> int:
    """0 where every fault was killed and no equivalent flagged, 1 where not so, 3 where something was not judged."""
    if not score.is_known:
        return UNJUDGED
    return SUCCESS if score.is_clean else UNEXPECTED


def exit_status(results: Iterable[CaseResult], *, is_shard: bool = False, faults: Score | None = None) -> int:
    """The worst status of all cases, and of the faults that were put into some, where that is part of the run.

    No case at all was not judged: 3; but one shard of a run may have none.
    """
    cases = [case_status(result) for result in results] or [SUCCESS if is_shard else UNJUDGED]
    return worst([*cases, *([] if faults is None else [faults_status(faults)])])


def error_status(error: BitproofError) -> int:
    """2 for a wrong call or case, 3 for everything that kept a case from being judged."""
    return WRONG_CALL if isinstance(error, UsageError) else UNJUDGED


def worst(statuses: Iterable[int]) -> int:
    """The worst of some statuses. A status that is none of the four counts as not judged."""
    known = (status if status in WORST_FIRST else UNJUDGED for status in statuses)
    return min(known, key=WORST_FIRST.index)
