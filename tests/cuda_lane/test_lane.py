"""The CUDA lane at its smallest: one case, one layer, two ranks, one step. `make cuda-lane` runs every graph case."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cases import CASES, trainers
from harness.case.select import select
from tests.cuda_lane import stand_in
from tests.cuda_lane.run import every_graph_case

ROOT = Path(__file__).parents[2]
LANE = Path(__file__).with_name("run.py")
DEFECT = f"{Path(__file__).with_name('defects.py')}:forget_causality"
EIGHT = "0,1,2,3,4,5,6,7"

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", autouse=True)
def compiler():
    if problem := stand_in.why_not():
        pytest.skip(problem)


def small(case):
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=replace(case.parallelism, world_size=2), steps=1)


@pytest.fixture(scope="module")
def case_file(tmp_path_factory):
    """blocks_batch_offload in small: attention, experts, and copies to pinned memory and back."""
    file = tmp_path_factory.mktemp("case") / "case.json"
    file.write_text(json.dumps(small(CASES["blocks_batch_offload"]).to_dict()))
    return file


def run(script, *arguments, report_dir):
    command = [sys.executable, *script, *map(str, arguments), "--report-dir", str(report_dir), "--no-control"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    found = report_dir / "latest" / "report.json"
    assert found.exists(), done.stdout + done.stderr
    [case] = json.loads(found.read_text())["cases"]
    return case, "".join(file.read_text() for file in (report_dir / "latest").rglob("trace.log"))


def test_every_graph_case_is_every_case_whose_graph_runs_as_it_is():
    selected = select(list(CASES.values()), every_graph_case())
    assert {case.name for case in CASES.values()} - {case.name for case in selected} == {
        *("early_accumulation", "chunked_vs_unchunked", "inductor_dense", "inductor_moe", "regional_inductor"),
        *(case.name for case in trainers.CASES),
    }


def test_a_case_traced_for_two_gpus_is_one_code_and_equal_to_eager(case_file, tmp_path):
    case, log = run([LANE], "--devices", "0,7", "--case", case_file, report_dir=tmp_path)
    assert (case["verdict"], case["error"]) == ("EQUAL", None)
    assert sum(case["mismatched"].values()) == 0 < sum(case["compared"].values())
    assert "2 devices, mapped" in log
    assert "'aten._scaled_dot_product_flash_attention_backward.default': 2" in log
    assert "'device': " in log


@pytest.mark.slow
def test_the_code_is_one_for_all_eight_gpus(case_file, tmp_path):
    case, log = run([LANE], "--devices", EIGHT, "--case", case_file, report_dir=tmp_path)
    assert (case["verdict"], case["error"]) == ("EQUAL", None)
    assert "8 devices, mapped" in log


@pytest.mark.slow
def test_a_defect_that_only_the_cuda_form_has_is_different_in_the_lane_alone(case_file, tmp_path):
    arguments = ("--case", case_file, "--extra-pass", DEFECT)
    case, _ = run([LANE], "--devices", "0", *arguments, report_dir=tmp_path / "lane")
    assert case["verdict"] == "DIFFERENT"
    plain = ["-m", "harness", "run", "--device", "cpu"]
    case, _ = run(plain, *arguments, report_dir=tmp_path / "plain")
    assert case["verdict"] == "EQUAL"
