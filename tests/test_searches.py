"""The searches on steps of another kind: split over tensor and expert ranks, exported as a joint graph, of debug size.

A small case of each, from the command to what it prints. What searches do is tested where they stand; here, that such
steps are searched as any other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Batch, Case, Parallelism
from bitproof.harness.case.case_file import case_text, read_case
from bitproof.harness.cli import main
from tests.small import small

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

BATCH = Batch(sequences=2, seq_len=4)
TP_EP = replace(small(CASES["tp_ep_nightly"]), steps=2, parallelism=Parallelism(world_size=4, tp=4, ep=4), batch=BATCH)
JOINT = replace(
    small(CASES["joint_llama3_recomputed"]), steps=2, parallelism=Parallelism(world_size=4, tp=2, ep=1), batch=BATCH
)
FLIP = "flip-bit:rank=1,step=0,grad=layers.0.attention.wo.weight"
DEBUG = replace(
    small(CASES["blocks_batch_debug"]),
    steps=1,
    parallelism=Parallelism(world_size=2),
    batch=Batch(sequences=4, seq_len=8),
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


@pytest.fixture(params=[TP_EP, JOINT], ids=["tp_ep", "joint"])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def printed(case: Case, folder: Path, capsys: Any, command: str, *options: str) -> list[str]:
    """What a command prints of a case that differs."""
    file = folder / "start.json"
    file.write_text(case_text(case))
    assert main([command, str(file), "--report-dir", str(folder), "--device", "cpu", *options]) == 1
    lines: list[str] = capsys.readouterr().out.splitlines()
    return lines


@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        (FLIP, "to blame: bitwise_xor_.Scalar of the step itself"),
        ("gradients-exchanged", "the tensor holds what the reference has as grad "),
    ],
)
def test_a_flipped_bit_and_a_gradient_of_another_parameter_are_blamed(
    case: Case, fault: str, blamed: str, tmp_path: Path, capsys: Any
) -> None:
    assert blamed in "\n".join(printed(case, tmp_path, capsys, "localize", "--inject", fault))


def test_bisecting_names_the_pass(case: Case, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    lines = printed(case, tmp_path, capsys, "bisect", "--extra-pass", f"{file}:negate_a_gradient@after=bucket")
    assert [line for line in lines if line.startswith("negate_a_gradient is to blame: the prefix that ends with")]


def test_shrinking_keeps_the_system_and_what_is_wrong(case: Case, tmp_path: Path, capsys: Any) -> None:
    lines = printed(case, tmp_path, capsys, "shrink", "--inject", FLIP, "--tries", "2")
    assert "it fails: DIFFERENT, first in a grad, by bitwise_xor_.Scalar (update)" in lines
    assert any("try 1: steps 2 -> 1: fails the same way" in line for line in lines)
    small_case = read_case(tmp_path / "latest" / "shrunk" / "case.json")
    assert (small_case.steps, small_case.candidate) == (1, case.candidate)


@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        ("chunk-1-takes-the-first-half", "to blame: split.Tensor of layers.0 (forward)"),
        ("gradient-of-chunk-1-forgotten", "to blame: add.Tensor of layers.0.attention_norm (backward"),
    ],
)
def test_a_chunk_that_the_debug_model_loses_is_blamed(fault: str, blamed: str, tmp_path: Path, capsys: Any) -> None:
    assert blamed in "\n".join(printed(DEBUG, tmp_path, capsys, "localize", "--inject", fault))
