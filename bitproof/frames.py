"""Make a pandas DataFrame of a run's comparisons."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.errors import RecordingError
from bitproof.harness.execute.run_folder import first_runs
from bitproof.harness.records import CaseResult, Key, Record, Recording

_FIELDS = ("digest", "dtype", "shape", "placements")


def frame_of_run(result: CaseResult, run_dir: Path) -> pd.DataFrame:
    """A DataFrame with a row per tensor that either system recorded.

    Rows are in the order of computation, followed by tensors that only the candidate recorded.
    """
    reference, candidate = _recordings(result, run_dir)
    # A dict keeps the order of first insertion, so the reference's order comes first.
    keys = list(dict.fromkeys([*reference.records, *candidate.records]))
    table = pd.DataFrame(keys, columns=list(Key._fields))
    for side, recording in (("reference", reference), ("candidate", candidate)):
        found = [recording.records.get(key) for key in keys]
        for field in _FIELDS:
            # With any other dtype, pandas would turn None into NaN.
            table[f"{field}_{side}"] = pd.Series([_value_of(record, field) for record in found], dtype=object)
    table["equal"] = [key in candidate.records and _same(key, reference, candidate) for key in keys]
    return table


def _recordings(result: CaseResult, run_dir: Path) -> tuple[Recording, Recording]:
    """The recordings of both systems' first runs.

    Raises RecordingError if one is missing.
    """
    folder = run_dir / "recordings" / result.case.name
    found = dict(first_runs(folder))
    missing = [system for system in (result.case.reference, result.case.candidate) if system not in found]
    if missing:
        raise RecordingError(f"the run left no recording of {missing[0]}", where=str(folder))
    # If a case compares a system with itself, both are the same recording.
    return read_recording(found[result.case.reference]), read_recording(found[result.case.candidate])


def _value_of(record: Record | None, field: str) -> object:
    return None if record is None else getattr(record, field)


def _same(key: Key, reference: Recording, candidate: Recording) -> bool:
    left, right = reference.records.get(key), candidate.records[key]
    return left is not None and left[:3] == right[:3] and left.placements == right.placements
