"""Compare each system with its stored baseline, and find the call that made it drift."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bitproof.harness.capture.recording_files import add_calls
from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError
from bitproof.harness.execute.requests import CallRequest
from bitproof.harness.localize.logs.replay import packed_calls
from bitproof.harness.powers.baselines.baseline_folders import demanded, hold_against_baseline
from bitproof.harness.records import BaselineResult, BaselineStatus, CaseResult, Drift, Role, Verdict

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun

_DRIFT_TIMEOUT = 300.0  # seconds, to compare the values of two recordings


def baselines(result: CaseResult, run: CaseRun) -> CaseResult:
    """Compare each system's recording with its baseline. If a system drifted, find the first call that changed.

    With `options.files_baselines`, the first step's calls are also logged for recordings that have no baseline yet,
    since they may become baselines. If the calls of a drifted system cannot be logged, its result states the reason.
    """
    options, found = run.options, dict[Role, BaselineResult]()
    assert options.baseline_dir is not None, "only compared with baselines if there is a folder of them"

    def measure_drift(baseline: Path, recording: Path) -> list[Drift]:
        folders = {"baseline": baseline.resolve(), "recording": recording.resolve()}
        request = CallRequest(case=run.case, function=f"{__name__}:drift_of", values=folders)
        return [Drift(**each) for each in run.client.ask(request, _DRIFT_TIMEOUT).values["drift"]]

    for role, recording in run.recordings().items():
        system = getattr(result.case, role)
        about = hold_against_baseline(recording, options.baseline_dir, result.case, system, measure_drift)
        found[role] = demanded(about) if options.require_baseline else about
    for role, about in found.items() if result.verdict != Verdict.ERROR else ():
        if about.status == BaselineStatus.DRIFTED:
            found[role] = _with_call(about, run, role, run.recordings()[role])
        elif options.files_baselines and about.status not in (BaselineStatus.EQUAL, BaselineStatus.UNVERIFIED):
            log_calls(run, role, run.recordings()[role])
    return replace(result, baseline=found)


def drift_of(_: Case, baseline: str, recording: str) -> dict[str, list[Drift]]:
    """Return {"drift": the tensors that differ, each with the size of the difference}. Needs torch."""
    from bitproof.harness.compare.drift import measure_drift

    return {"drift": measure_drift(Path(baseline), Path(recording))}


def log_calls(run: CaseRun, role: Role, recording: Path) -> str | None:
    """Log the calls of a recording's first step, and store the log beside the recording.

    Returns the reason if that fails, otherwise None.
    """
    from bitproof.harness.powers.baselines.moved_call import LOGGED_STEP

    try:
        add_calls(recording, LOGGED_STEP, [packed_calls(archive) for archive in run.log_calls(role, LOGGED_STEP)])
    except BitproofError as error:
        return error.what
    return None


def _with_call(about: BaselineResult, run: CaseRun, role: Role, recording: Path) -> BaselineResult:
    from bitproof.harness.powers.baselines.moved_call import moved_call

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
