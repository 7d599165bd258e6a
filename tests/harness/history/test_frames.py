"""Histories as DataFrames; what one run compared is tested where one runs, in tests/bitproof/test_runs.py."""

from __future__ import annotations

import pytest

import bitproof
from bitproof.harness.errors import RecordingError
from bitproof.harness.history.database import add_runs
from bitproof.harness.history.frames import frame_of_run
from tests.harness.reports import case, result, write_report


def test_a_history_is_a_row_a_run_and_case_by_time(tmp_path):
    db = tmp_path / "history.sqlite"
    runs = [
        write_report(
            tmp_path / "runs", [result(case("a")), result(case("b"), verdict)], run_id=f"2026010{day}T030405Z-a"
        )
        for day, verdict in ((2, "EQUAL"), (1, "ERROR"))
    ]
    add_runs(db, runs)
    frame = bitproof.history(db)
    assert frame[["run_id", "name", "verdict"]].values.tolist() == [
        ["20260101T030405Z-a", "a", "EQUAL"],
        ["20260101T030405Z-a", "b", "ERROR"],
        ["20260102T030405Z-a", "a", "EQUAL"],
        ["20260102T030405Z-a", "b", "EQUAL"],
    ]
    assert frame.time.is_monotonic_increasing and frame.time.dtype.kind == "M"
    assert len(bitproof.history(db, last=1)) == 2


def test_a_run_without_recordings_has_no_frame(tmp_path):
    with pytest.raises(RecordingError, match="the run left no recording of eager"):
        frame_of_run(result(case()), tmp_path)
