from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.harness.case import Case
from bitproof.harness.commands.expected_time import tell_expected_time
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
    assert tell_expected_time([FIRST], CPU, reports) == "expect about 10 minutes, as these cases took here before"
    told = tell_expected_time([FIRST, SECOND], CPU, reports)
    assert told == "expect more than 10 minutes: so long 1 of the 2 cases took here before"


def test_nothing_is_guessed_where_nothing_like_it_ran(reports: Path, tmp_path: Path) -> None:
    assert tell_expected_time([SECOND], CPU, reports) is None
    assert tell_expected_time([FIRST], (), reports) is None, "it ran otherwise"
    assert tell_expected_time([replace(FIRST, steps=2)], CPU, reports) is None, "it is another case"
    assert tell_expected_time([FIRST], CPU, tmp_path / "none") is None
