"""Decide the exit status of a run: the worst status of its cases. From worst to best, the statuses are 2, 3, 1, 0."""

from __future__ import annotations

from collections.abc import Iterable

from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.records import CaseResult, Score, Verdict

SUCCESS = 0
UNEXPECTED = 1
WRONG_CALL = 2
UNJUDGED = 3

WORST_FIRST = (WRONG_CALL, UNJUDGED, UNEXPECTED, SUCCESS)


def case_status(result: CaseResult) -> int:
    """Return a case's exit status: 0 if as expected, 3 if the case or a check could not be judged, otherwise 1."""
    # Before the expectation, which says nothing about a case that could not be judged.
    is_judged = result.verdict not in (Verdict.UNVERIFIED, Verdict.ERROR)
    if not is_judged or any(found.unjudged for found in result.checks.values()):
        return UNJUDGED
    return SUCCESS if result.as_expected else UNEXPECTED


def faults_status(score: Score) -> int:
    """Return the exit status of a run's injected faults.

    - 0: every fault was caught, and no rewrite that keeps every bit was reported as a difference.
    - 1: some fault was not caught, or some such rewrite was reported.
    - 3: a planned fault was not judged.
    """
    if not score.is_known:
        return UNJUDGED
    return SUCCESS if score.is_clean else UNEXPECTED


def exit_status(results: Iterable[CaseResult], *, is_shard: bool = False, faults: Score | None = None) -> int:
    """Return the worst status of all cases, and of the injected faults if there are any.

    Without any case it is 3 (not judged), or 0 for a shard, which may have no cases.
    """
    cases = [case_status(result) for result in results] or [SUCCESS if is_shard else UNJUDGED]
    return worst([*cases, *([] if faults is None else [faults_status(faults)])])


def error_status(error: BitproofError) -> int:
    """Return the exit status for an error: 2 for a wrong call or case, 3 (not judged) for any other."""
    return WRONG_CALL if isinstance(error, UsageError) else UNJUDGED


def worst(statuses: Iterable[int]) -> int:
    """Return the worst of these statuses. A status other than 0, 1, 2 and 3 counts as 3 (not judged)."""
    known = (status if status in WORST_FIRST else UNJUDGED for status in statuses)
    return min(known, key=WORST_FIRST.index)
