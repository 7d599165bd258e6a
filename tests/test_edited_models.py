"""The command line over models and passes that do what must be refused, though both sides would agree on it.

Models are copies of the sources, with a line of the MoE's forward edited.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cases import CASES
from tests.small import small

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
PLACE = "        x_TD = x_BSD.flatten(0, 1)\n"
ATTENTION = "        x_BSD = torch.softmax(x_BSD @ x_BSD.transpose(1, 2), -1) @ x_BSD\n"
ASSERTION = """
import torch


def doubt(module):
    graph = module.graph
    with graph.inserting_before(graph.output_node()):
        size = {"dtype": torch.bool, "device": torch.device("cpu")}
        false = graph.call_function(torch.ops.aten.full.default, ([], False), size)
        graph.call_function(torch.ops.aten._assert_async.msg, (false, "planted and not so"))
    module.recompile()
"""


def run(folder: Path, case: str, *arguments: str) -> tuple[int, dict[str, object]]:
    """Exit status and result of `bitproof run` of a case, in one layer, with the packages that `folder` holds."""
    (folder / "case.json").write_text(json.dumps(small(CASES[case]).to_dict()))
    arguments = ("--case", "case.json", *arguments)
    command = [sys.executable, "-m", "harness", "run", "--world-size", "2", "--steps", "1", "--no-control", *arguments]
    finished = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}
    )
    [result] = json.loads((folder / "reports" / "latest" / "report.json").read_text())["cases"]
    return finished.returncode, result


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for package in ("bitproof", "harness", "reference", "cases"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("reference", [pytest.param("eager", marks=pytest.mark.slow), "eager_chunked"])
def test_attention_written_out_in_a_module_that_is_cut_along_the_sequence_is_refused_in_graph_and_eager(
    sources: Path, reference: str
) -> None:
    file = sources / "reference" / "layers" / "moe.py"
    text = file.read_text()
    assert text.count(PLACE) == 1
    file.write_text(text.replace(PLACE, ATTENTION + PLACE))
    status, result = run(sources, "moe_seq", "--reference", reference)
    assert (status, result["verdict"]) == (3, "ERROR")
    assert "ChunkError: cannot chunk layers.0.moe along seq" in str(result["error"])
    assert ("graph" if reference == "eager" else "eager_chunked") in str(result["logs"])


def test_a_false_assertion_ends_the_graph_as_it_would_end_eager(tmp_path: Path) -> None:
    (tmp_path / "doubtful.py").write_text(ASSERTION)
    for package in ("bitproof", "harness", "reference", "cases"):
        (tmp_path / package).symlink_to(ROOT / package)
    status, result = run(tmp_path, "moe_batch", "--extra-pass", "doubtful.py:doubt@before=clean_up")
    assert (status, result["verdict"]) == (3, "ERROR")
    assert "planted and not so" in str(result["error"])
