"""Finds the operator call that made a recording differ from its baseline, by comparing the call logs of the two."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from bitproof.harness.capture.recording_files import checked_calls_path, read_recording
from bitproof.harness.errors import RecordingError
from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import call_of
from bitproof.harness.localize.differing import differing_digests
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.replay import read_log
from bitproof.harness.powers.baselines.baseline_folders import name_baseline_sides
from bitproof.harness.records import BlamedCall, Recording
from bitproof.harness.validate import read

LOGGED_STEP = 0
"""The step whose calls a baseline stores. Most changes in code already show in the first step."""


def moved_call(baseline: Path, recording: Path) -> BlamedCall | None:
    """Return the operator call that made a recording differ from its baseline; None if no call explains it.

    Compares the call logs that are stored with the two recordings. Raises RecordingError if a log is missing or
    damaged, or if the recordings differ only after the step whose calls are logged.
    """
    there, here = read_recording(baseline), read_recording(recording)
    differing = differing_digests(there, here, LOGGED_STEP)
    if not differing:
        raise RecordingError(f"the drift begins after step {LOGGED_STEP}, whose calls alone a baseline keeps")
    logs = _logs(baseline, there), _logs(recording, here)
    try:
        culprit = find_culprit(*logs, differing)
        call = None if culprit is None else call_of(culprit)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # a log of values that no recorder writes
        raise RecordingError("a baseline's log of calls is damaged", found=str(error), where=str(baseline)) from error
    if call is None:
        return None
    read(BlamedCall, asdict(call), "the call that moved", RecordingError, where=str(baseline))  # names may be no texts
    # The call is described as a difference of baseline and run, not of reference and candidate.
    return replace(call, how=name_baseline_sides(call.how or ""), chain=None)


def _logs(folder: Path, recording: Recording) -> list[list[Call]]:
    manifest = recording.manifest
    return [read_log(checked_calls_path(folder, manifest, rank)) for rank in range(manifest.world_size)]
