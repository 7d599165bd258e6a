"""The examples of training loops that join: real FSDP2 and torch.compile on two ranks, a step each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitproof.builtin_cases.examples import compiled
from bitproof.builtin_cases.layouts import trainers
from bitproof.harness.case import Parallelism
from bitproof.harness.errors import MachineError
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Verdict
from bitproof.reference.parallel.mesh import Mesh
from tests.hosts import one_host

LOOP = Path("cases/examples/fsdp2_loop.py")
# Inductor compiles for half a minute; what is kept gathered is to a recorder what is gathered again.
QUICK = (trainers.loop_bf16_reduce, trainers.compiled_aot_eager)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each came to."""
    cases = [replace(case, steps=1) for case in QUICK]
    options = RunOptions(device="cpu", timeout=300.0, control="never")
    with one_host():
        found = list(run_cases(cases, options, tmp_path_factory.mktemp("run")))
    return {result.case.name: result for result in found}


@pytest.mark.ranks
def test_each_gets_its_expected_verdict(results):
    found = {name: (result.verdict, result.as_expected, result.error) for name, result in results.items()}
    assert found == {
        "loop_bf16_reduce": (Verdict.DIFFERENT, True, None),
        "compiled_aot_eager": (Verdict.EQUAL, True, None),
    }
    assert min(results["compiled_aot_eager"].compared[kind] for kind in ("loss", "grad", "param", "optimizer")) >= 2


@pytest.mark.ranks
def test_the_call_that_fsdp2_makes_in_another_dtype_is_blamed_with_its_line_and_the_others_are_reported(results):
    first = results["loop_bf16_reduce"].first_divergence
    assert (first.kind, first.name, first.call.operator, first.call.direction) == (
        "grad",
        "embedding.weight",
        "chunk_cat",
        "backward",
    )
    assert first.call.module is None, "FSDP2 reduces the root's gradients after backward, in no module"
    verification = first.call.verification
    assert (verification.status, verification.remaining) == ("verified", 0), "all calls of the kernel are one cause"
    assert "chunk_cat of blocks.0 (backward) on ranks 0, 1" in verification.calls
    assert first.call.how == "has the same inputs and a different output"
    assert first.call.ranks == "0, 1"
    file, line = re.fullmatch(r"(.+):(\d+)", first.call.source).groups()
    assert file == "builtin_cases/examples/fsdp2_loop.py"
    assert LOOP.read_text().splitlines()[int(line) - 1].strip() == "loss.backward()"


def test_cases_of_trainers_run_on_2_ranks_and_one_expects_each_verdict():
    for case in trainers.CASES:
        assert (case.steps, case.parallelism.world_size) == (3, 2)
    assert [case.expected for case in trainers.CASES] == ["EQUAL", "EQUAL", "DIFFERENT", "EQUAL", "CLOSE"]


def test_inductor_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    mesh = Mesh(0, Parallelism(world_size=1, ep=1), torch.device("cpu"))
    with pytest.raises(MachineError) as error:
        compiled.inductor(trainers.compiled_inductor, mesh)
    assert str(error.value) == (
        "MachineError: Inductor cannot compile for this CPU without a C++ compiler\n"
        "  found: no program /nonexistent is found"
    )
