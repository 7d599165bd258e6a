from __future__ import annotations

import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.harness.capture.recording_files import CALLS, read_manifest
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.case_file import case_text
from bitproof.harness.cli import main
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.powers.baselines.report import baselines_of
from bitproof.harness.records import Verdict
from bitproof.harness.report import json as report_json
from tests.harness.forging import sha256, vouch

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_host")]

SYSTEM = """
import torch
from tests.harness.toy_systems import Toy

class Made(Toy):
    def step(self, index, observe):
        loss, gradients = self.gradients(torch.full((2, 3), 0.5 + index + self.rank / 8))
        observe("loss", "loss", loss)
        gradient = gradients["weight"] * 1.0
        observe("grad", "weight", gradient)
        self.moment = self.moment * 0.9 + gradient
        self.weight = self.weight - 1e-6 * self.moment
        observe("param", "weight", self.weight)
        observe("optimizer", "weight.moment", self.moment)

def make(case, mesh):
    return Made(case, mesh)

def other(case, mesh):
    return Made(case, mesh)
"""
MOVED = SYSTEM.replace("* 1.0", "/ 0.9999999")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a case of two systems of one file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_SHA", "c0ffee")
    (tmp_path / "mine.py").write_text(SYSTEM)
    case = Case(
        name="mine",
        family="toys",
        reference=f"{tmp_path}/mine.py:make",
        candidate=f"{tmp_path}/mine.py:other",
        steps=2,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    (tmp_path / "case.json").write_text(case_text(case))
    return tmp_path


def accept(why="first", *more):
    return main(["accept", "--case", "case.json", "--device", "cpu", "--why", why, *more])


def run(*more):
    status = main(["run", "--case", "case.json", "--device", "cpu", "--no-control", "--baseline", *more])
    [result] = report_json.read(Path("reports/latest/report.json")).cases
    return status, result


def test_all_that_drifted_is_accepted_at_once_with_the_reason_and_the_operator_that_moved_is_reported(folder, capsys):
    assert accept("first", "--new") == 0
    baselines = sorted((folder / "baselines" / "mine").glob("*/*"))
    assert len(baselines) == 2 and all((path / CALLS / "rank1.zip").is_file() for path in baselines)
    status, result = run("--require-baseline")
    assert (status, {about.status for about in baselines_of(result).values()}) == (0, {BaselineStatus.EQUAL})

    (folder / "mine.py").write_text(MOVED)
    status, result = run()
    assert (status, result.verdict) == (1, Verdict.EQUAL)
    for about in baselines_of(result).values():
        assert about.status == BaselineStatus.DRIFTED and about.drift[0].max_ulp >= 1
        assert about.call.operator == "div.Tensor" and about.call.source.endswith("mine.py:9"), about
    capsys.readouterr()

    assert accept("a division, as the paper has it") == 0
    said = capsys.readouterr().out
    assert re.search(r"grad weight: .* by at most \d+ ULP", said)
    assert said.count("moved first: div.Tensor of the step itself") == 4
    assert said.count("mine: accepted ") == 2
    for path in (folder / "baselines" / "mine").glob("*/*"):
        accepted = read_manifest(path).accepted
        assert (accepted.why, accepted.commit) == ("a division, as the paper has it", "c0ffee")
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", accepted.date)
    assert run("--require-baseline")[0] == 0
    assert accept("again") == 0
    assert "mine: nothing drifted" in capsys.readouterr().out


def test_a_case_whose_systems_part_keeps_its_baselines(folder, capsys):
    assert accept("first", "--new") == 0
    before = {path: path.read_bytes() for path in folder.glob("baselines/*/*/*/*") if path.is_file()}
    text = SYSTEM.replace(
        "def other(case, mesh):\n    return Made(case, mesh)", "def other(case, mesh):\n    return Late(case, mesh)"
    )
    late = SYSTEM.split("def make")[0].replace("class Made", "class Late").replace("* 1.0", "/ 0.9999999")
    (folder / "mine.py").write_text(text + late)
    assert accept("wrong") == 1
    assert "mine: DIFFERENT, expected EQUAL: its baselines are left as they are" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.glob("baselines/*/*/*/*") if path.is_file()} == before


def test_a_missing_baseline_fails_where_that_is_asked_for_and_an_unused_one_is_reported(folder, capsys):
    status, result = run()
    assert (status, {about.status for about in baselines_of(result).values()}) == (0, {BaselineStatus.NO_BASELINE})
    (folder / "baselines" / "gone" / "graph").mkdir(parents=True)
    capsys.readouterr()
    status, result = run("--require-baseline")
    assert (status, result.as_expected) == (1, False)
    assert {about.status for about in baselines_of(result).values()} == {BaselineStatus.MISSING}
    said = capsys.readouterr().out
    assert "EQUAL, baseline objects, no baseline of reference, no baseline of candidate" in said
    assert "unused baseline: baselines/gone/graph, of no system of any case that is known" in said


def test_a_log_that_is_damaged_or_no_recorders_takes_the_operator_and_neither_the_drift_nor_the_run(folder):
    assert accept("first", "--new") == 0
    for path in folder.glob("baselines/*/*/*/calls/rank0.zip"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    (folder / "mine.py").write_text(MOVED)
    check_operator_is_not_known("is damaged")
    for path in folder.glob("baselines/*/*/*"):
        for rank in (0, 1):
            with zipfile.ZipFile(path / CALLS / f"rank{rank}.zip", "w") as archive:
                archive.writestr("calls.jsonl", json.dumps([1, [None, [], 3, 4], [{}], [[]], [7], [None], "x"]) + "\n")
        sums = [sha256(path / CALLS / f"rank{rank}.zip") for rank in (0, 1)]
        vouch(path, calls={"step": 0, "sha256": sums})
    check_operator_is_not_known("")


def check_operator_is_not_known(why):
    status, result = run()
    assert status == 1 and result.verdict == Verdict.EQUAL
    for about in baselines_of(result).values():
        assert about.status == BaselineStatus.DRIFTED and about.call is None
        assert "the operator that moved is not known: " in about.reasons[-1] and why in about.reasons[-1]


def test_a_baseline_is_accepted_for_a_reason(folder, capsys):
    assert accept(" ") == 2
    assert "a baseline is accepted for a reason" in capsys.readouterr().err
    assert main(["run", "--case", "case.json", "--require-baseline"]) == 2
    assert "--require-baseline needs --baseline" in capsys.readouterr().err


def test_a_baseline_of_another_environment_is_no_baseline_where_one_is_demanded():
    from bitproof.harness.powers.baselines.baseline_folders import require_baseline

    other = BaselineResult(status=BaselineStatus.NOT_COMPARABLE, path="p", reasons=["machine.cpu: a, b"])
    assert require_baseline(other) == replace(
        other, status=BaselineStatus.MISSING, reasons=["no baseline is of this environment", "machine.cpu: a, b"]
    )
    equal = BaselineResult(status=BaselineStatus.EQUAL, compared=1)
    assert require_baseline(equal) is equal
