"""A fingerprint has every field that decides a step; one that differs is refused by its name."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitproof.builtin_cases import CASES
from bitproof.harness.case import AdamW, Batch, Case, Memory, Model, Parallelism, Pipeline, Precision
from bitproof.harness.errors import ArtifactError
from bitproof.harness.graph.passes import chunk
from bitproof.harness.machine.torch_build import TorchBuild
from bitproof.harness.precompile import fingerprint
from bitproof.harness.precompile.fingerprint import UNDECIDED, digest_of, fingerprint_of, refuse_other

CPU = torch.device("cpu")
CASE = CASES["moe_seq"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own files are read once."""
    monkeypatch.setattr(fingerprint, "own_digest", lambda: "of our files")


def refused(case: Case, system: str = "graph") -> ArtifactError:
    """What a run of another case is told of the step of CASE."""
    with pytest.raises(ArtifactError) as error:
        refuse_other(fingerprint_of(CASE, "graph", CPU), fingerprint_of(case, system, CPU), "here")
    return error.value


def test_every_field_of_a_case_decides_or_is_known_not_to() -> None:
    fields = {field.name for field in dataclasses.fields(Case)}
    decided = {"chunking", "seed", "model", "parallelism", "batch", "precision", "memory", "pipeline", "autoplace"}
    decided |= {"preload", "options"}  # what they import and hand over may be anything
    refused = {"observe", "schedule"}  # what looks at activations is not precompiled, nor what is cut into stages
    assert fields == decided | refused | set(UNDECIDED)


def test_what_decides_no_step_changes_no_fingerprint() -> None:
    other = replace(
        CASE,
        name="other",
        family="other",
        reference="graph",
        steps=1,
        grad_norm=True,
        optimizer=AdamW(lr=1.0),
        batch=replace(CASE.batch, data="adversarial"),
    )
    assert digest_of(fingerprint_of(other, "graph", CPU)) == digest_of(fingerprint_of(CASE, "graph", CPU))


@pytest.mark.parametrize(
    ("changes", "name", "leaf"),
    [
        ({"model": Model(layers=2)}, "model", "model.layers=2"),
        ({"batch": Batch(sequences=2)}, "shapes", "shapes.sequences=2"),
        ({"precision": Precision(reduce="bfloat16")}, "dtypes", "dtypes.reduce='bfloat16'"),
        ({"parallelism": Parallelism(ep=4)}, "parallelism", "parallelism.ep=4"),
        ({"parallelism": Parallelism(world_size=4)}, "world size", "world_size=4"),
        ({"chunking": replace(CASE.chunking, modules="layers.*")}, "chunking", "chunking.modules='layers.*'"),
        ({"memory": Memory(policy="full")}, "memory", "memory.policy='full'"),
        ({"pipeline": Pipeline(bucket=True)}, "pipeline", "pipeline.bucket=True"),
        ({"pipeline": Pipeline(backend="inductor")}, "pipeline", "pipeline.backend='inductor'"),
        ({"seed": 1}, "seed", "seed=1"),
    ],
)
def test_another_case_is_refused_by_the_field_that_differs(changes: Any, name: str, leaf: str) -> None:
    error = refused(replace(CASE, **changes))
    assert error.what == f"the precompiled step was made for something else: {name}"
    assert error.expected == f"{leaf}, as this run has it" and error.where == "here"


def test_another_system_is_refused() -> None:
    assert refused(replace(CASE, chunking=None, reference="eager"), "joint").what.endswith(": system")


@pytest.mark.parametrize(
    ("module", "name", "value", "field"),
    [
        (fingerprint, "own_digest", lambda: "edited", "sources"),
        (fingerprint, "FORM", 3, "form"),
        (fingerprint, "torch_build", lambda: TorchBuild("2.14.0", "0" * 40, "flags"), "torch"),
        (fingerprint, "torch_digest", lambda: "edited", "torch"),
        (fingerprint, "start_up_code", lambda: {"sitecustomize": "sha256"}, "start up"),
        (fingerprint.sys, "version", "3.12.0 (main)", "python"),
        (fingerprint, "_capability", lambda device: ["x86_64", "AVX1024"], "capability"),
        (fingerprint, "read_switches", lambda: {"deterministic_algorithms": False}, "switches"),
        (fingerprint, "environment_of_keys", lambda: {"TORCH_LOGS": "+dynamo"}, "environment"),
    ],
)
def test_another_process_or_machine_is_refused_by_the_field_that_differs(
    module: Any, name: str, value: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fingerprint_of(CASE, "graph", CPU)
    monkeypatch.setattr(module, name, value)
    with pytest.raises(ArtifactError, match=f"made for something else: {field}\n"):
        refuse_other(made, fingerprint_of(CASE, "graph", CPU), "here")


def test_another_compiler_counts_for_compiled_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = replace(CASE, pipeline=Pipeline(backend="inductor"))
    plain, made = (fingerprint_of(case, "graph", CPU) for case in (CASE, compiled))
    assert plain["compiler"] is None and len(made["compiler"]) == 3
    monkeypatch.setattr(fingerprint, "compiled_for", lambda: ["g++", "another version", "another processor"])
    refuse_other(plain, fingerprint_of(CASE, "graph", CPU), "here")
    with pytest.raises(ArtifactError, match="made for something else: compiler\n"):
        refuse_other(made, fingerprint_of(compiled, "graph", CPU), "here")


def test_an_edited_cost_model_is_refused(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    case = replace(CASE, pipeline=Pipeline(overlap=True, overlap_costs=str(costs)))
    made = fingerprint_of(case, "graph", CPU)
    refuse_other(made, fingerprint_of(case, "graph", CPU), "here")
    costs.write_text("{} ")
    with pytest.raises(ArtifactError, match="made for something else: costs\n"):
        refuse_other(made, fingerprint_of(case, "graph", CPU), "here")
    costs.unlink()
    with pytest.raises(ArtifactError, match="expected: costs='unreadable: No such file"):
        refuse_other(made, fingerprint_of(case, "graph", CPU), "here")


def test_a_value_of_another_kind_or_a_field_left_out_is_another_fingerprint() -> None:
    made = fingerprint_of(CASE, "graph", CPU)
    forged = made | {"pipeline": made["pipeline"] | {"bucket": 0}}
    assert forged == made and digest_of(forged) != digest_of(made)
    with pytest.raises(ArtifactError, match=r"something else: pipeline\n  expected: pipeline.bucket=False"):
        refuse_other(forged, made, "here")
    with pytest.raises(ArtifactError, match="something else: costs"):
        refuse_other({name: value for name, value in made.items() if name != "costs"}, made, "here")


def test_a_pass_that_was_edited_is_refused_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fingerprint_of(CASE, "graph", CPU)
    edited = tmp_path / "chunk.py"
    edited.write_text(Path(chunk.__file__).read_text() + "\n# edited\n")
    found = fingerprint.inspect.getsourcefile
    monkeypatch.setattr(
        fingerprint.inspect, "getsourcefile", lambda run: str(edited) if run.__name__ == "chunk" else found(run)
    )
    with pytest.raises(ArtifactError, match=r"something else: passes\n  expected: passes\[1\].source="):
        refuse_other(made, fingerprint_of(CASE, "graph", CPU), "here")


def test_the_device_and_threads_of_one_launch_count_as_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fingerprint_of(CASE, "graph", CPU)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    refuse_other(made, fingerprint_of(CASE, "graph", CPU), "here")
    with pytest.raises(ArtifactError, match="something else: device\n"):
        refuse_other(made | {"device": "cuda"}, made, "here")
    with pytest.raises(ArtifactError, match="something else: forged\n"):
        refuse_other(made | {"forged": 1}, made, "here")
