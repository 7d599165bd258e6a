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

from bitproof.builtin_cases import CASES
from bitproof.harness.cli import main
from tests.small import small

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
PLACE = "        with annotate(COMPUTE):\n"
ATTENTION = "        x_BSD = torch.softmax(x_BSD @ x_BSD.transpose(1, 2), -1) @ x_BSD\n"
BRANCH = "        x_BSD = torch.cond(x_BSD.sum() > 0, lambda x: x * 2.0, lambda x: x * 3.0, (x_BSD,))\n"
NORM = """        x_BDS = x_BSD.transpose(1, 2)
        x_BSD = torch.nn.functional.batch_norm(x_BDS, None, None, training=True).transpose(1, 2)
"""
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


def words(folder: Path, case: str, *arguments: str) -> list[str]:
    """A call of `bitproof run` of a case, in one layer, which reports into `folder`."""
    (folder / "case.json").write_text(json.dumps(small(CASES[case]).to_dict()))
    where = ("--case", str(folder / "case.json"), "--report-dir", str(folder / "reports"))
    return ["run", "--world-size", "2", "--steps", "1", "--no-control", *where, *arguments]


def result_in(folder: Path) -> dict[str, object]:
    [result] = json.loads((folder / "reports" / "latest" / "report.json").read_text())["cases"]
    return result


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for package in ("bitproof", "harness", "reference", "cases"):
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["eager", "eager_chunked"])
@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (ATTENTION, "ChunkError: cannot chunk layers.0.moe along seq"),
        (BRANCH, "ChunkError: cannot chunk layers.0.moe: it calls cond"),
        (NORM, "ChunkError: cannot chunk layers.0.moe along seq: batch_norm"),
    ],
)
def test_a_module_that_mixes_the_sequence_along_which_it_is_cut_is_refused_in_graph_and_eager(
    sources: Path, reference: str, line: str, refusal: str
) -> None:
    file = sources / "reference" / "layers" / "moe.py"
    text = file.read_text()
    assert text.count(PLACE) == 1
    file.write_text(text.replace(PLACE, line + PLACE))
    command = [sys.executable, "-m", "bitproof", *words(sources, "moe_seq", "--reference", reference)]
    finished = subprocess.run(command, capture_output=True, cwd=sources, env=os.environ | {"PYTHONPATH": str(sources)})
    result = result_in(sources)
    assert (finished.returncode, result["verdict"]) == (3, "ERROR")
    assert refusal in str(result["error"])
    assert ("graph" if reference == "eager" else "eager_chunked") in str(result["logs"])


def test_a_false_assertion_ends_the_graph_as_it_would_end_eager(tmp_path: Path, one_host: None) -> None:
    (tmp_path / "doubtful.py").write_text(ASSERTION)
    status = main(words(tmp_path, "moe_batch", "--extra-pass", f"{tmp_path}/doubtful.py:doubt@before=clean_up"))
    result = result_in(tmp_path)
    assert (status, result["verdict"]) == (3, "ERROR")
    assert "planted and not so" in str(result["error"])
