"""Runs as pandas DataFrames: one run's comparisons, and the results of many runs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.errors import RecordingError
from bitproof.harness.history.beside import first_runs
from bitproof.harness.history.database import Outcome, read_nights
from bitproof.harness.history.trends import commit_of
from bitproof.harness.records import ROLES, CaseResult, Key, Record, Recording

_TOLD = ("digest", "dtype", "shape", "placements")


def frame_of_run(result: CaseResult, run_dir: Path) -> pd.DataFrame:
    """A row a tensor that either side recorded, in the order in which they were computed, the reference's first."""
    reference, candidate = _recordings(result, run_dir)
    keys = list(dict.fromkeys([*reference.records, *candidate.records]))
    table = pd.DataFrame(keys, columns=list(Key._fields))
    for side, recording in (("reference", reference), ("candidate", candidate)):
        found = [recording.records.get(key) for key in keys]
        for field in _TOLD:
            table[f"{field}_{side}"] = pd.Series([_told(record, field) for record in found], dtype=object)
    table["equal"] = [key in candidate.records and _same(key, reference, candidate) for key in keys]
    return table


def frame_of_history(path: Path, last: int) -> pd.DataFrame:
    """A row a run and case, by time."""
    nights = read_nights(path, last)
    rows = [
        {"run_id": night.run_id, "time": night.time, "commit": commit_of(night), **_columns(outcome)}
        for night in nights
        for outcome in night.outcomes.values()
    ]
    return pd.DataFrame(rows)


def _columns(outcome: Outcome) -> dict[str, object]:
    """An outcome's fields, and each side's throughput as columns of numbers; None for what is not known."""
    found: dict[str, object] = {name: value for name, value in vars(outcome).items() if name != "throughput"}
    for side in ROLES:
        speed = outcome.throughput.get(side)
        for figure in ("step_seconds", "tokens_per_second", "mfu"):
            found[f"{figure}_{side}"] = speed and getattr(speed, figure)
    return found


def _recordings(result: CaseResult, run_dir: Path) -> tuple[Recording, Recording]:
    """Both sides' first runs; one serves both where a case compares a system with itself."""
    folder = run_dir / "recordings" / result.case.name
    found = dict(first_runs(folder))
    missing = [system for system in (result.case.reference, result.case.candidate) if system not in found]
    if missing:
        raise RecordingError(f"the run left no recording of {missing[0]}", where=str(folder))
    return read_recording(found[result.case.reference]), read_recording(found[result.case.candidate])


def _told(record: Record | None, field: str) -> object:
    return None if record is None else getattr(record, field)


def _same(key: Key, reference: Recording, candidate: Recording) -> bool:
    left, right = reference.records.get(key), candidate.records[key]
    return left is not None and left[:3] == right[:3] and left.placements == right.placements
