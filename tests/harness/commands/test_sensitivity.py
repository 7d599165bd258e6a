"""`bitproof sensitivity` as it is called."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cases import CASES
from harness.cli import main
from harness.commands import sensitivity as command
from harness.records import Sensitivity, Verdict
from tests.harness.report.test_sensitivity import FOUND
from tests.harness.reports import case, result

pytestmark = pytest.mark.ranks


def test_k_and_case_both_say_what_to_run(tmp_path, capsys):
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASES["moe_seq"].to_dict()))
    assert main(["sensitivity", "-k", "moe_seq", "--case", str(file)]) == 2
    assert "-k and --case both say what to run" in capsys.readouterr().err


class Desk:
    """Where cases are placed and nobody runs."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def place(self, case):
        return None


@pytest.mark.parametrize(
    ("verdict", "found", "status"),
    [
        ("EQUAL", FOUND, 0),
        ("EQUAL", Sensitivity(reason="it cannot be"), 3),
        ("DIFFERENT", FOUND, 1),
    ],
)
def test_the_status_is_that_of_the_run_and_3_where_nothing_was_measured(tmp_path, monkeypatch, verdict, found, status):
    given = result(case("near"), verdict)
    asked = []

    class Run:
        def __init__(self, *_):
            pass

        def result(self):
            return given

        def recordings(self):
            return {"candidate": tmp_path}

    def sense(task, log, timeout):
        asked.append((task.sample, task.seconds, timeout))
        return found

    monkeypatch.setattr(command, "open_desk", Desk)
    monkeypatch.setattr("harness.execute.case_run.CaseRun", Run)
    monkeypatch.setattr(command, "lease_gpus", lambda *_: Desk())
    monkeypatch.setattr(command, "sense_apart", sense)
    effort = command.Effort(sample=5, seconds=60.0)
    assert command.sensitivity([given.case], command.RunOptions(device="cpu"), effort, tmp_path) == status
    assert asked == ([(5, 60.0, 60.0 + command.MARGIN)] if verdict == "EQUAL" else []), "what is wrong is not measured"
    told = json.loads((tmp_path / "latest" / "report.json").read_text())["cases"][0]
    assert told["verdict"] == verdict and (told["sensitivity"] is not None) == (verdict == "EQUAL")


def test_a_case_that_differs_as_it_should_counts_as_measured():
    missing = replace(result(case("near")), verdict=Verdict.EQUAL, sensitivity=None)
    assert command._is_missing(missing) and not command._is_missing(replace(missing, sensitivity=FOUND))
