"""The files of `doctor --gpu`: what they hold, and when a later call goes on with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.harness.powers.doctor import gpu_command
from bitproof.harness.powers.doctor.command import Torch
from bitproof.harness.powers.doctor.gpu_command import CASES_TRIED, HUNG, KILLED, NAMES, CheckLine, examine_gpus
from bitproof.harness.powers.doctor.plan import GPU_CHECKS, minutes
from bitproof.harness.powers.doctor.saved_results import FILE, KIND, PAGE, earlier
from bitproof.harness.runtime import disk_cache

EIGHT = Torch(version="2.13.0+cu128", gloo=True, nccl=True, gpus=["H200"] * 8)
ALL = (*NAMES, KILLED, HUNG, *CASES_TRIED)
ROOT = Path(__file__).parents[4]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Calls of `doctor --gpu` on eight GPUs that are not there: the checks that each tried, until it is cut."""

    monkeypatch.setenv("BITPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_command, "gpu_topology", lambda: ["GPU0 X NV18"])

    def call(torch: Torch = EIGHT, until: str | None = None, fails: str | None = None) -> list[str]:
        ran: list[str] = []

        def run(name: str) -> CheckLine:
            ran.append(name)
            return CheckLine(name=name, outcome="FAIL" if name == fails else "pass", found=f"found of {name}")

        def run_cases(case, name, *others, **options):
            return run(name)

        monkeypatch.setattr(gpu_command, "run_checks", lambda device, ranks, names, **others: map(run, names))
        monkeypatch.setattr(gpu_command, "try_case", run_cases)
        for line in examine_gpus(tmp_path, torch):
            if line.name == until:
                break
        return ran

    return call


def test_the_plan_is_of_every_check_in_the_order_in_which_they_run_and_the_page_says_the_same() -> None:
    assert tuple(GPU_CHECKS) == ALL
    page = (ROOT / "docs/explanation/gpus.md").read_text().partition("## The first hour")[2].partition("\n## ")[0]
    reported = [line for line in page.splitlines() if line.startswith("| ")][1:]
    rows = [
        f"| {f'`{name}`' if x.kind == 'case' else name} | {x.seconds / 60:.1f} | {x.shows} | {x.means} | {x.then} |"
        for name, x in GPU_CHECKS.items()
    ]
    assert reported == rows
    assert f"{minutes()} minutes" in page


PASSED = ["topology", "digests", "grouped products", "rows without tokens", "offload"]


def test_a_call_that_was_cut_short_is_gone_on_with_and_what_failed_is_tried_again(tried, tmp_path: Path) -> None:
    assert tried(until="offload", fails="attention") == [*ALL[: ALL.index("offload") + 1]]
    assert [x.name for x in earlier(tmp_path / "cache", gpu_command.about(EIGHT))] == PASSED
    assert tried() == [name for name in ALL if name not in PASSED]
    found = json.loads((tmp_path / FILE).read_text())
    assert found["is_over"] and {x["name"]: x["found"] for x in found["tried"]} == {x: f"found of {x}" for x in ALL}
    assert tried() == [*ALL], "a call that reached its end is not gone on with"


def test_another_machine_other_libraries_or_other_code_begin_anew(tried, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(until="offload")
    assert tried(replace(EIGHT, version="2.14.1+cu130"), until="attention") == ["topology", "digests", "attention"]
    assert tried(replace(EIGHT, gpus=["H100"] * 8), until="attention") == ["topology", "digests", "attention"]
    monkeypatch.setattr(gpu_command, "own_digest", lambda: "other code")
    assert tried(replace(EIGHT, gpus=["H100"] * 8), until="attention") == ["topology", "digests", "attention"]


@pytest.mark.parametrize(
    "value", [None, [], {"about": {}}, {"about": {}, "tried": [{"name": "digests"}]}, "of another"]
)
def test_what_is_kept_and_is_no_first_hour_of_this_machine_is_begun_anew(tried, tmp_path: Path, value: object) -> None:
    about = gpu_command.about(EIGHT)
    if value == "of another":
        tried(until="attention")
        value = disk_cache.read_cached(tmp_path / "cache", KIND, json.dumps(about, sort_keys=True))
        assert value["tried"] and [x.name for x in earlier(tmp_path / "cache", about)][:2] == ["topology", "digests"]
        value["about"]["code"] = "of another"
    disk_cache.keep(tmp_path / "cache", KIND, json.dumps(about, sort_keys=True), value)
    assert tried() == [*ALL]


def test_a_passed_check_cannot_be_forged_by_who_may_write_the_report_folder(tried, tmp_path: Path) -> None:
    tried(until="offload", fails="attention")
    forged = json.loads((tmp_path / FILE).read_text())
    for each in forged["tried"]:
        each["outcome"] = "pass"
    (tmp_path / FILE).write_text(json.dumps(forged))
    assert tried() == [name for name in ALL if name not in PASSED]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_believed(tried, tmp_path: Path, what: str) -> None:
    tried(until="offload")
    cache = tmp_path / "cache"
    for path in [cache] if what == "folder" else [*cache.iterdir()]:
        path.chmod(path.stat().st_mode | 0o022)
    assert tried() == [*ALL]


@pytest.mark.parametrize(
    "name", ["NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_HIGH_PRIORITY"]
)
def test_other_settings_begin_anew(tried, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tried(until="offload")
    monkeypatch.setenv(name, "1")
    assert tried() == [*ALL]


def test_the_page_has_every_check_and_what_a_failure_means(tried, tmp_path: Path) -> None:
    tried(until="grouped products", fails="attention")
    page = (tmp_path / PAGE).read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")][2:]
    assert [row[1] for row in rows] == [*ALL]
    assert [row[0] for row in rows] == ["pass", "pass", "FAIL", "pass", *["not reached"] * (len(ALL) - 4)]
    means = "cases with attention are NONDETERMINISTIC; then: its line has the kernel of each dtype and head dim"
    assert [row[5] for row in rows if row[5]] == [means]
    assert f"{minutes(ALL[4:])} of {minutes()} planned minutes are left." in page
    assert "- GPUs: H200, H200," in page and "- how they are joined: GPU0 X NV18" in page


def test_without_a_gpu_nothing_is_kept(tmp_path: Path) -> None:
    assert len(list(examine_gpus(tmp_path, replace(EIGHT, gpus=[])))) == len(ALL)
    assert not list(tmp_path.iterdir())


def test_without_a_cache_nothing_is_taken_over(tmp_path: Path) -> None:
    assert earlier(None, {}) == earlier(tmp_path, {}) == ()
