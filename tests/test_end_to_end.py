"""The command line over the real model, eager and graph, on real ranks; fewer of both than the cases have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GRADIENT = "layers.1.moe.router.weight"


def run(tmp_path, *arguments):
    """Exit status and report of `bitproof run` with 4 ranks and 2 steps."""
    command = [sys.executable, "-m", "harness", "run", "--world-size", "4", "--steps", "2", "--device", "cpu"]
    command += ["--report-dir", str(tmp_path), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    report = tmp_path / "latest" / "report.json"
    return finished, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("case", ["transformer_batch", "moe_seq"])
def test_the_chunked_graph_equals_the_chunked_eager_step(case, tmp_path):
    finished, report = run(tmp_path, "-k", f"{case} and chunking")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "EQUAL"
    assert result["compared"]["loss"] == 8
    assert not any(result["mismatched"].values())
    assert result["losses"]["reference"] == result["losses"]["candidate"]
    assert [entry["name"] for entry in result["passes"]] == ["clean_up", "chunk", "concretize_symbols"]


def test_one_flipped_bit_of_one_gradient_is_reported_at_its_step_rank_and_name(tmp_path):
    finished, report = run(
        tmp_path, "-k", "moe_seq and chunking", "--inject", f"flip-bit:grad={GRADIENT},rank=3,step=1"
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    [result] = report["cases"]
    first = result["first_divergence"]
    assert (first["step"], first["rank"], first["kind"], first["name"]) == (1, 3, "grad", GRADIENT)
    assert (first["elements_differing"], first["max_ulp"]) == (1, 1)
    assert result["mismatched"]["grad"] == 1
    assert result["control"] == {"reference": "EQUAL", "candidate": "EQUAL"}


def test_early_accumulation_differs_in_gradients_before_anything_else(tmp_path):
    finished, report = run(tmp_path, "-k", "early_accumulation")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "DIFFERENT"
    assert result["differing_kinds"] == ["grad", "param", "optimizer"]
    assert (result["first_divergence"]["step"], result["first_divergence"]["kind"]) == (0, "grad")


def test_a_selection_of_nothing_is_a_wrong_call(tmp_path):
    finished, report = run(tmp_path, "-k", "no_such_case")
    assert (finished.returncode, report) == (2, None)
    assert "transformer_batch" in finished.stderr
