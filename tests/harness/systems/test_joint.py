"""The system joint: its column, one code for every rank, eager's bits, its cut, and faults in it."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitproof.builtin_cases import joint
from bitproof.harness.case import JOINT, Case, Memory, Parallelism
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.disturb.mutate import mutate
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.passes.partition import partition
from bitproof.harness.systems.graph import prepare, trace
from bitproof.harness.systems.graph_program import GraphProgram
from tests.harness.graph.graphs import context_of
from tests.harness.systems.test_graph import assert_eagers_bits
from tests.small import small

CPU = torch.device("cpu")
LLAMA3, DEEPSEEK = map(small, (joint.joint_llama3_fsdp4_tp2, joint.joint_deepseek_ep2))
ON_TWO = replace(LLAMA3, parallelism=Parallelism(world_size=2, ep=1, tp=2), memory=Memory(policy="full"))
EP_ON_TWO = replace(DEEPSEEK, parallelism=Parallelism(world_size=2))


@functools.cache
def prepared(case: Case) -> GraphProgram:
    """A case's program, made once for all tests that only read it."""
    return prepare(case, CPU, system=JOINT)


def test_the_column_of_an_exported_step_divides_it_first() -> None:
    names = [report.name for report in prepared(ON_TWO).passes]
    assert names == [
        *("clean_up", "partition", "tag_memory", "rematerialize", "bucket", "concretize_symbols", "measure_memory")
    ]
    cut = prepared(ON_TWO).passes[1].facts
    assert cut["nodes_forward"] < cut["nodes_joint"] < cut["nodes_forward"] + cut["nodes_backward"]
    assert 0 < cut["saved_bytes"] < cut["uncut_bytes"]


def test_the_minimum_cut_of_a_model_saves_fewer_bytes_than_torchs_default() -> None:
    found = {}
    for by in ("min_cut", "default"):
        step = trace(LLAMA3, CPU, system=JOINT).joint
        context = context_of(step)
        partition(step.module, context, by=by)
        found[by] = dict(context.facts)
    assert found["min_cut"]["saved_bytes"] < 0.8 * found["default"]["saved_bytes"]
    assert found["min_cut"]["recomputed"] > found["default"]["recomputed"]


def test_preparing_again_gives_the_same_code_and_as_any_rank() -> None:
    assert prepare(ON_TWO, CPU, system=JOINT).code_hash == prepared(ON_TWO).code_hash


@pytest.mark.ranks
@pytest.mark.parametrize("case", [ON_TWO, EP_ON_TWO], ids=lambda case: case.name)
def test_the_exported_step_has_eagers_bits(case: Case, tmp_path: Path) -> None:
    assert_eagers_bits(case, lambda: prepared(case), tmp_path)


def test_faults_are_struck_into_an_exported_step_or_refused_by_name() -> None:
    module = prepared(EP_ON_TWO).module
    for name in (
        "gradients-exchanged",
        "gradient-of-a-branch-lost",
        "gradient-not-averaged",
        "shared-experts-forgotten",
    ):
        assert str(mutate(CATALOGUE[name], module, EP_ON_TWO).module.graph) != str(module.graph)
    with pytest.raises(UsageError) as error:
        mutate(CATALOGUE["tokens-counted-twice"], module, EP_ON_TWO)
    assert str(error.value).startswith("UsageError: fault tokens-counted-twice never fired")
    with pytest.raises(UsageError) as error:
        mutate(CATALOGUE["gate-and-up-exchanged"], module, EP_ON_TWO)
    assert str(error.value).startswith(
        "UsageError: fault gate-and-up-exchanged cannot be struck into the graph of case joint_deepseek_ep2\n"
        "  expected: a graph in which the calls that it exchanges stand as our tracer records them\n"
        "  found: the graph is malformed: "
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        (
            "flip-bit:rank=1,step=0,grad=layers.1.attention.wq.weight",
            "to blame: bitwise_xor_.Scalar of the step itself",
        ),
        ("gradient-of-a-branch-lost", "to blame: add.Tensor of norm (backward)"),
        ("gradients-exchanged", "the tensor holds what the reference has as grad "),
    ],
)
def test_a_flipped_bit_a_lost_gradient_and_exchanged_ones_are_caught_and_blamed(
    fault: str, blamed: str, tmp_path: Path
) -> None:
    options = ["-k", "joint_llama3_fsdp4_tp2", "--world-size", "2", "--steps", "1", "--report-dir", str(tmp_path)]
    command = [sys.executable, "-m", "bitproof", "run", *options, "--inject", fault]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert answer.returncode == 1, answer.stderr
    assert "1 DIFFERENT" in answer.stdout and blamed in answer.stdout
