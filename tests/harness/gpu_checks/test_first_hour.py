"""The files of `doctor --gpu`: what they hold, and when a later call goes on with them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.harness.commands import doctor_gpu
from bitproof.harness.commands.doctor import MAIN_CASES, Torch
from bitproof.harness.commands.doctor_gpu import HUNG, KILLED, NAMES, CheckLine, examine_gpus
from bitproof.harness.gpu_checks.first_hour import FILE, PAGE, PLAN, earlier

TWO = Torch(version="2.13.0+cu128", gloo=True, nccl=True, gpus=["H200"] * 2)
ALL = (*NAMES, KILLED, HUNG, *MAIN_CASES)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Calls of `doctor --gpu` on two GPUs that are not there: the checks that each tried, until it is cut."""

    def call(torch: Torch = TWO, until: str | None = None, fails: str | None = None) -> list[str]:
        ran: list[str] = []

        def run(name: str) -> CheckLine:
            ran.append(name)
            return CheckLine(name=name, outcome="FAIL" if name == fails else "pass", found=f"found of {name}")

        def run_cases(case, name, *others):
            return run(name)

        monkeypatch.setattr(doctor_gpu, "run_checks", lambda device, ranks, names: map(run, names))
        monkeypatch.setattr(doctor_gpu, "try_case", run_cases)
        monkeypatch.setattr(doctor_gpu, "gpu_topology", lambda: ["GPU0 X NV18"])
        for line in examine_gpus(tmp_path, torch):
            if line.name == until:
                break
        return ran

    return call


def test_the_plan_is_of_every_check_in_the_order_in_which_they_run_and_the_page_has_that_order() -> None:
    assert tuple(PLAN) == ALL
    page = (ROOT / "docs/explanation/gpus.md").read_text().partition("## The first hour")[2]
    table = re.findall(r"^\| (?!check|--)(.*?) \|", page.partition("\n## ")[0], re.MULTILINE)
    assert [name for cell in table for name in cell.replace("`", "").split(", ")] == [*ALL]


def test_a_call_that_was_cut_short_is_gone_on_with_and_what_failed_is_tried_again(tried, tmp_path: Path) -> None:
    assert tried(until="offload", fails="attention") == [*ALL[: ALL.index("offload") + 1]]
    assert [x.name for x in earlier(tmp_path, doctor_gpu.about(TWO))] == ["digests", "grouped products", "offload"]
    assert tried() == [name for name in ALL if name not in ("digests", "grouped products", "offload")]
    found = json.loads((tmp_path / FILE).read_text())
    assert found["is_over"] and {x["name"]: x["found"] for x in found["tried"]} == {x: f"found of {x}" for x in ALL}
    assert tried() == [*ALL], "a call that reached its end is not gone on with"


def test_another_machine_other_libraries_or_other_code_begin_anew(tried, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(until="offload")
    assert tried(replace(TWO, version="2.14.1+cu130"), until="attention") == ["digests", "attention"]
    assert tried(replace(TWO, gpus=["H100"] * 2), until="attention") == ["digests", "attention"]
    monkeypatch.setattr(doctor_gpu, "own_digest", lambda: "other code")
    assert tried(replace(TWO, gpus=["H100"] * 2), until="attention") == ["digests", "attention"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"about": {}}', '{"about": {}, "tried": [{"name": "digests"}]}'])
def test_a_damaged_file_is_begun_anew(tried, tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert tried() == [*ALL]


def test_the_page_has_every_check_and_what_a_failure_means(tried, tmp_path: Path) -> None:
    tried(until="grouped products", fails="attention")
    page = (tmp_path / PAGE).read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")][2:]
    assert [row[1] for row in rows] == [*ALL]
    assert [row[0] for row in rows] == ["pass", "FAIL", "pass", *["not reached"] * (len(ALL) - 3)]
    assert [row[5] for row in rows if row[5]] == ["cases with attention are NONDETERMINISTIC"]
    assert "- GPUs: H200, H200" in page and "- how they are joined: GPU0 X NV18" in page


def test_without_a_gpu_nothing_is_kept(tmp_path: Path) -> None:
    assert len(list(examine_gpus(tmp_path, replace(TWO, gpus=[])))) == len(ALL)
    assert not list(tmp_path.iterdir())


def test_a_pipe_in_the_file_s_place_is_no_earlier_call(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    assert earlier(tmp_path, {}) == ()
