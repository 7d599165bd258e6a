"""The searches on a step whose placements were solved for: each run solves again, and comes to the same plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Autoplace, Batch
from bitproof.harness.case.case_file import case_text, read_case
from bitproof.harness.cli import main
from tests.small import small

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

PLACED = replace(
    small(CASES["autoplace_llama3_fsdp2_tp2"]),
    steps=1,
    autoplace=Autoplace(memory_mib=64.0),
    batch=Batch(sequences=2, seq_len=4),
    grad_norm=False,
)
WRONG = '''
import torch
from torch.fx import GraphModule

aten = torch.ops.aten


def negate_a_gradient(module: GraphModule) -> None:
    """The last parameter's gradient, negated on its way out."""
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        negated = module.graph.call_function(aten.neg.default, (output.args[0][-1],))
    output.args = ([*output.args[0][:-1], negated],)
'''


def run(folder: Path, capsys: Any, *command: str) -> tuple[int, str]:
    """A command's status, and what it prints."""
    status = main([*command, "--report-dir", str(folder / "reports"), "--device", "cpu"])
    return status, capsys.readouterr().out


@pytest.fixture
def case(tmp_path: Path) -> str:
    file = tmp_path / "placed.json"
    file.write_text(case_text(PLACED))
    return str(file)


def test_a_pass_that_is_wrong_on_a_placed_step_is_named(case: str, tmp_path: Path, capsys: Any) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    status, reported = run(
        tmp_path, capsys, "bisect", case, "--extra-pass", f"{wrong}:negate_a_gradient@after=clean_up"
    )
    assert status == 1 and "negate_a_gradient is to blame: the prefix that ends with" in reported


def test_faults_in_a_placed_step_are_caught_and_found(case: str, tmp_path: Path, capsys: Any) -> None:
    status, reported = run(tmp_path, capsys, "faults", "--case", case, "--steps", "1", "--fault", "gradients-exchanged")
    assert status == 0, reported


def test_a_placed_case_that_differs_is_made_smaller_and_stays_one_that_is_placed(
    case: str, tmp_path: Path, capsys: Any
) -> None:
    flip = "flip-bit:rank=1,step=0,grad=layers.0.attention.wo.weight"
    status, reported = run(tmp_path, capsys, "shrink", case, "--inject", flip, "--tries", "3", "--jobs", "1")
    assert status == 1, reported
    [small_case] = (tmp_path / "reports").glob("2*/shrunk/case.json")
    assert read_case(small_case).autoplace == PLACED.autoplace
