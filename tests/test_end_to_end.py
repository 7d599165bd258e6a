"""The command line over the real model, eager and graph, on real ranks; fewer of both than the cases have."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GRADIENT = "layers.1.moe.router.weight"


def run(tmp_path, *arguments):
    """Exit status and report of `bitproof run` with 4 ranks and 2 steps, and controls only where they are needed."""
    command = [sys.executable, "-m", "harness", "run", "--world-size", "4", "--steps", "2", "--device", "cpu"]
    command += ["--report-dir", str(tmp_path), *arguments]
    command += [] if "--no-control" in arguments else ["--control", "when-different"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    report = tmp_path / "latest" / "report.json"
    return finished, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("case", ["transformer_batch", "moe_seq"])
def test_the_chunked_graph_equals_the_chunked_eager_step(case, tmp_path):
    finished, report = run(tmp_path, "-k", case)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "EQUAL"
    assert result["compared"]["loss"] == 8
    assert not any(result["mismatched"].values())
    assert result["losses"]["reference"] == result["losses"]["candidate"]
    names = [entry["name"] for entry in result["passes"]]
    assert names == ["clean_up", "chunk", "concretize_symbols", "measure_memory"]


def test_one_flipped_bit_of_one_gradient_is_reported_at_its_step_rank_and_name(tmp_path):
    finished, report = run(tmp_path, "-k", "moe_seq", "--inject", f"flip-bit:grad={GRADIENT},rank=3,step=1")
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


EXAMPLES = "cases/examples/extra_passes.py"


def run_example(tmp_path, function):
    return run(
        tmp_path, "-k", "moe_batch", "--world-size", "2", "--steps", "1", "--extra-pass", f"{EXAMPLES}:{function}"
    )


def test_an_extra_pass_that_moves_waits_is_equal_and_its_graphs_can_be_read(tmp_path):
    finished, report = run_example(tmp_path, "wait_late@after=chunk")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "EQUAL"
    names = [entry["name"] for entry in result["passes"]]
    assert names.index("wait_late") == names.index("chunk") + 1
    entry = result["passes"][names.index("wait_late")]
    assert (entry["nodes_before"], entry["changed"]) == (entry["nodes_after"], {})
    digest = hashlib.sha256((ROOT / EXAMPLES).read_bytes()).hexdigest()
    manifest = json.loads((tmp_path / "latest/recordings/moe_batch/graph/manifest.json").read_text())
    assert {"name": "wait_late", "settings": {"sha256": digest}} in manifest["graph"]["passes"]
    assert report["options"][-2:] == ["--extra-pass", f"{EXAMPLES}:wait_late@after=chunk"]
    assert (report["remarks"], result["stress"]) == ([], None)


def test_an_extra_pass_that_rounds_gradients_differs_and_its_graphs_can_be_read(tmp_path):
    finished, report = run(
        tmp_path,
        *("-k", "moe_batch", "--world-size", "2", "--steps", "1", "--reference", "graph", "--no-control"),
        *("--extra-pass", f"{EXAMPLES}:add_gradients_in_bfloat16", "--dump-graphs"),
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "DIFFERENT"
    assert result["first_divergence"]["kind"] == "grad"
    assert result["control"] == {"reference": None, "candidate": None}
    assert report["remarks"] == ["--no-control: no system ran twice, so noise was not told from defects"]
    assert f"{report['remarks'][0]}\n" in finished.stdout and "--no-control" in report["options"]
    graphs = tmp_path / "latest" / "graphs"
    [diff] = (graphs / "moe_batch").glob("*-add_gradients_in_bfloat16.diff")
    added = [line for line in diff.read_text().splitlines() if line.startswith("+")]
    assert any("dtype=torch.bfloat16" in line and "-> bfloat16[" in line for line in added)
    assert not list((graphs / "moe_batch.reference").glob("*add_gradients*"))
    assert len(list((graphs / "moe_batch" / "tlparse").iterdir())) == 1


def test_an_extra_pass_that_raises_makes_the_case_an_error_that_names_it_with_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("def drop(module):\n    raise ValueError('my mistake')\n")
    finished, report = run(tmp_path, "-k", "moe_batch", "--world-size", "2", "--extra-pass", f"{tmp_path}/mine.py:drop")
    assert finished.returncode == 3, finished.stdout + finished.stderr
    [result] = report["cases"]
    assert result["verdict"] == "ERROR"
    head, _, traceback = result["error"].partition("\n\n")
    assert head == (
        "RankError: graph failed before its ranks started\n  found: ValueError: my mistake\n  came from: in pass: drop"
    )
    assert traceback.startswith("Traceback (most recent call last):")
    assert "raise ValueError('my mistake')" in traceback and "mine.py" in traceback
