"""Run the checks that have command-line options, and users' own checks.

A check gets the findings of earlier checks. If a check raises an exception, its finding states that the case was not
judged.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import Case
from bitproof.harness.checks.check import Check, Evidence
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.execute.requests import CallRequest
from bitproof.harness.localize.logs.replay import read_log
from bitproof.harness.options import ROLES, Role, RunOptions
from bitproof.harness.records import CaseResult, Code, Finding

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun

_CALL_TIMEOUT = 300.0  # seconds


def with_findings(result: CaseResult, run: CaseRun) -> CaseResult:
    for check in run.options.active:
        if (finding := judged(check, evidence_of(result, run, check.name))) is not None:
            result = replace(result, checks=result.checks | {check.name: finding})
    return result


def prepare_all(cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[str]:
    """Call each active check's `prepare` before any case runs, and yield the lines that these calls yield.

    Raises UsageError if a check refuses the run, or if its `prepare` fails.
    """
    # All checks may refuse before any of them works, which may take long.
    for check in options.active:
        check.refuse(options)
    for check in options.active:
        try:
            yield from check.prepare(cases, options, folder)
        except (BitproofError, GeneratorExit):
            raise
        except Exception as error:  # a check may be a user's code
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UsageError(
                f"check {check.name} failed before any case ran",
                found=f"{type(error).__name__}: {error}",
                where=f"{last.filename}:{last.lineno}",
            ) from error


def evidence_of(result: CaseResult, run: CaseRun, name: str) -> Evidence:
    """Return what the check `name` gets as evidence: the case's result, its recordings, and a function that runs a
    system again.
    """
    return Evidence(
        result=result,
        options=run.options,
        log=run.folders.log_of(name),
        path=lambda role: run.recordings()[_known(role)].resolve(),
        recording=lambda role: run.recording(_known(role)),
        # Named after the check, so that the runs of two checks have different folders.
        run=lambda role: read_recording(run.run_again(_known(role), f"check-{name}")),
        log_calls=lambda role, step: run.log_calls(_known(role), step),
        calls=lambda role, step: [read_log(archive) for archive in run.log_calls(_known(role), step)],
        call=lambda function, **values: (
            run.client.ask(CallRequest(case=run.case, function=function, values=values), _CALL_TIMEOUT).values
        ),
        packing=None if run.every_call is None else tuple(sorted(run.every_call.found.packing)),
    )


def _refuse_other_than_json(check: Check, found: Finding) -> None:
    # The report is JSON: other data are refused here, while the check is known.
    try:
        json.dumps(found.data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"check {check.name} returns data that JSON cannot represent",
            expected="texts, finite numbers, booleans, None, lists, and dictionaries with texts as keys",
            found=str(error),
        ) from error


def _known(role: Role) -> Role:
    if role not in ROLES:
        raise UsageError("a case has no such system", expected="reference or candidate", found=repr(role))
    return role


def judged(check: Check, evidence: Evidence) -> Finding | None:
    """Return a check's finding about a case; None if the check has none.

    The finding states that the case was not judged if the check raises an exception, or returns neither None nor a
    Finding that fits JSON.
    """
    try:
        if not check.judges(evidence.result.verdict):
            return None
        found = check.judge(evidence)
        if not isinstance(found, Finding | None):
            return Finding(unjudged=f"judge returned {type(found).__name__}, neither a Finding nor None")
        if found is not None:
            _refuse_other_than_json(check, found)
        return found
    except BitproofError as error:
        return Finding(unjudged=error.what, blocks=(Code("error", str(error)),))
    # A check may be a user's code, and must not end the run of the other cases.
    except (Exception, SystemExit) as error:
        return Finding(
            unjudged=f"it raised {type(error).__name__}: {error}"[:500],
            blocks=(Code("traceback", traceback.format_exc()),),
        )
