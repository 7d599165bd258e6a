from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bitproof.harness.case import Case
from bitproof.harness.commands import expected_time
from bitproof.harness.commands.expected_time import describe_expected_time
from bitproof.harness.compare.outcome import result_of_error
from bitproof.harness.errors import RankError
from bitproof.harness.records import CaseSeconds, Report
from bitproof.harness.report.write import write_run

FIRST, SECOND = (Case(name=name, family="x", reference="eager") for name in ("first", "second"))
CPU = ("--device", "cpu")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A report folder with two runs of one case, the newer one longer, and something else."""
    for run_id, seconds in (("20260101-000000", 100.0), ("20260102-000000", 600.0)):
        result = result_of_error(FIRST, RankError("x"), device="cpu", backend="gloo")
        result.seconds = CaseSeconds(total=seconds)
        report = Report(run_id=run_id, exit_status=3, environment={}, cases=[result], options=CPU)
        (tmp_path / run_id).mkdir()
        write_run(report, tmp_path / run_id)
    (tmp_path / "20260103-000000").mkdir()
    (tmp_path / "20260103-000000" / "report.json").write_text("{")
    return tmp_path


def test_a_run_is_expected_to_take_what_its_cases_took_last(reports: Path) -> None:
    assert describe_expected_time([FIRST], CPU, reports) == "expect about 10 minutes, as these cases took here before"
    text = describe_expected_time([FIRST, SECOND], CPU, reports)
    assert text == "expect more than 10 minutes: so long 1 of the 2 cases took here before"


def test_nothing_is_guessed_where_nothing_like_it_ran(reports: Path, tmp_path: Path) -> None:
    assert describe_expected_time([SECOND], CPU, reports) is None
    assert describe_expected_time([FIRST], (), reports) is None, "it ran otherwise"
    assert describe_expected_time([replace(FIRST, steps=2)], CPU, reports) is None, "it is another case"
    assert describe_expected_time([FIRST], CPU, tmp_path / "none") is None


def test_reports_of_runs_too_short_to_judge_are_not_read(
    reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        expected_time.report_json,
        "read",
        lambda path: read.append(path.parent.name) or Report(run_id="x", exit_status=0, environment={}, cases=[]),
    )
    began = datetime(2026, 1, 1, 0, 0, 0, tzinfo=UTC).timestamp()
    folder = tmp_path / "short"
    for name, seconds in (("20260101T000000Z-aaaaaa", 29), ("20260101T000000Z-bbbbbb", 3)):
        (folder / name).mkdir(parents=True)
        (folder / name / "report.json").write_text("{}")
        os.utime(folder / name / "report.json", (began + seconds, began + seconds))
    assert describe_expected_time([FIRST, SECOND], CPU, folder) is None and read == []
    for seconds in (31, -1):  # long enough for two cases together; or written before it began, which says nothing
        os.utime(folder / "20260101T000000Z-bbbbbb" / "report.json", (began + seconds, began + seconds))
        assert describe_expected_time([FIRST, SECOND], CPU, folder) is None
        assert len(read) == 2
        read.clear()


def test_the_newest_report_that_knows_every_case_is_the_last_that_is_read(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, own = [], expected_time.report_json.read
    monkeypatch.setattr(expected_time.report_json, "read", lambda path: read.append(path.parent.name) or own(path))
    describe_expected_time([FIRST], CPU, reports)
    assert read == ["20260103-000000", "20260102-000000"]
