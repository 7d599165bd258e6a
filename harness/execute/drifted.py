"""Log the calls of the first step, for new baselines, and to explain why a recording drifted from its baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bitproof.harness.capture.recording_files import add_calls
from bitproof.harness.errors import BitproofError
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.localize.logs.replay import packed_calls
from bitproof.harness.records import BaselineResult, BaselineStatus, CaseResult, Role, Verdict


def with_moved_calls(result: CaseResult, run: CaseRun, recordings: dict[Role, Path], *, files: bool) -> CaseResult:
    """The result, with the first changed call of each side that drifted from its baseline.

    A replay logs the calls of the drifted recording's first step. With `files`, the calls of recordings that may become
    baselines are logged too. If the calls of a drifted side cannot be logged, the side's result states the reason.
    """
    found: dict[Role, BaselineResult] = {}
    if result.verdict == Verdict.ERROR:
        return result
    # An EQUAL side keeps its baseline, and an UNVERIFIED side cannot become one, so neither needs a log.
    for role, about in result.baseline.items():
        found[role] = about
        drifted = about.status == BaselineStatus.DRIFTED
        if drifted or (files and about.status not in (BaselineStatus.EQUAL, BaselineStatus.UNVERIFIED)):
            found[role] = _with_call(about, run, role, recordings[role]) if drifted else about
            if not drifted:
                log_calls(run, role, recordings[role])
    return replace(result, baseline=found)


def log_calls(run: CaseRun, role: Role, recording: Path) -> str | None:
    """Store the calls of a recording's first step beside it. If that fails, returns the reason in words, else None."""

    from bitproof.harness.localize.moved import LOGGED_STEP

    try:
        add_calls(recording, LOGGED_STEP, [packed_calls(archive) for archive in run.log_calls(role, LOGGED_STEP)])
    except BitproofError as error:
        return error.what
    return None


def _with_call(about: BaselineResult, run: CaseRun, role: Role, recording: Path) -> BaselineResult:

    from bitproof.harness.localize.moved import moved_call

    why = log_calls(run, role, recording)
    if why is None:
        try:
            assert about.path is not None
            call = moved_call(Path(about.path), recording)
            return replace(about, call=call) if call else _because(about, "no logged call explains what drifted")
        except BitproofError as error:
            why = error.what
    return _because(about, why)


def _because(about: BaselineResult, why: str) -> BaselineResult:
    return replace(about, reasons=[*about.reasons, f"the operator that moved is not known: {why}"])
