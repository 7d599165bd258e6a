"""The commands beside `run`, as functions: what they return, write, refuse, and that they print nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import bitproof
from bitproof.builtin_cases.chunking import moe_seq, transformer_batch
from bitproof.harness.case import Batch, Model, Parallelism
from bitproof.harness.case.case_file import read_case
from tests.benchmarks import defective_trainers

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_host")]

PASS = "cases/examples/extra_passes.py:add_gradients_in_bfloat16"
SMALL = replace(
    transformer_batch,
    steps=1,
    parallelism=Parallelism(world_size=2, ep=1),
    batch=Batch(sequences=2, seq_len=1),
    model=Model(layers=2, dense_layers=2, dim=8, heads=1),
)


def test_localize_finds_the_cause_whatever_the_case_expects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system = f"{defective_trainers.__file__}:ddp"
    found = bitproof.localize(
        reference=system, candidate=f"{system}__tanh_gelu", world_size=2, steps=1, report_dir=tmp_path
    )
    assert found.verdict == "DIFFERENT" and found.first_divergence is not None
    call = found.first_divergence.call
    assert call is not None and (call.operator, call.module) == ("gelu", "blocks.0")
    assert json.loads((found.folder / "localize.json").read_text())["verdict"] == "DIFFERENT"
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_bisect_names_the_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bitproof.bisect(SMALL, extra_passes=[PASS], report_dir=tmp_path)
    assert found.blamed == "add_gradients_in_bfloat16" and found.problem is None and found.probes
    assert not capsys.readouterr().out and (tmp_path / "latest" / "bisect.json").exists()


@pytest.mark.slow
def test_shrink_returns_the_small_case_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bitproof.shrink(SMALL, extra_passes=[PASS], tries=3, jobs="1", report_dir=tmp_path)
    assert found.exit_status == 1 and found.symptom and found.extra_passes == (PASS,)
    assert found.case_file is not None and found.result is not None
    assert read_case(found.case_file).model.layers == 1
    assert found.file is not None and "import torch" in found.file.read_text()
    assert not capsys.readouterr().out
    nothing = bitproof.shrink(SMALL, jobs="1", report_dir=tmp_path)
    assert (nothing.exit_status, nothing.symptom, nothing.case_file) == (0, None, None)


@pytest.mark.slow
def test_sensitivity_is_measured_of_a_case_that_is_as_expected(tmp_path: Path) -> None:
    found = bitproof.sensitivity(SMALL, sample=5, report_dir=tmp_path)
    assert found is not None and found.total("tried") == 5


def test_prove_gives_the_answer_of_a_process_of_its_own(tmp_path: Path) -> None:
    model = replace(SMALL.model, layers=1, dense_layers=1)
    found = bitproof.prove(replace(SMALL, reference="eager", chunking=None, model=model), report_dir=tmp_path)
    assert found.verdict == bitproof.ProofVerdict.PROVED and found.outputs


def test_a_keyword_of_another_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"prove\(\) got an unexpected keyword argument 'inject'"):
        bitproof.prove(moe_seq, inject="flip-bit", report_dir=tmp_path)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes no until: those are a case's"):
        bitproof.prove(abs, abs, until="chunk")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes no dynamic_shapes"):
        bitproof.prove(moe_seq, dynamic_shapes={})  # type: ignore[call-overload]
    with pytest.raises(bitproof.UsageError, match="has no passes to bisect"):
        bitproof.bisect(replace(moe_seq, candidate="eager_chunked"), report_dir=tmp_path)
    assert not list(tmp_path.iterdir())
