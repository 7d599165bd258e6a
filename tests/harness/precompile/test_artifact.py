"""A step comes back from disk as the same code, by reading alone; one that is another on another rank is not made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Parallelism, Pipeline
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.disturb.mutate import mutate
from bitproof.harness.errors import ArtifactError, CaseError, TraceError, UsageError
from bitproof.harness.graph.groups import Group
from bitproof.harness.precompile import artifact, file, fingerprint
from bitproof.harness.precompile.artifact import precompile, read_program
from bitproof.harness.records import PassReport
from bitproof.harness.runtime.sources import Sources
from bitproof.harness.systems import graph as graph_system
from bitproof.harness.systems.graph import TracedStep
from bitproof.harness.systems.graph_program import GraphProgram, Layout, code_hash
from tests.small import small

CPU = torch.device("cpu")
CASE = CASES["moe_seq"]
aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def step_of(rank: int = 0, function: Any = aten.mul.Tensor) -> GraphModule:
    """A step as a rank might trace it, with the rank in its code unless that is 0."""
    graph = Graph()
    weight = graph.placeholder("weight")
    scaled = graph.call_function(function, (weight, 2.0 + rank))
    launched = graph.call_function(c10d.all_reduce.default, (scaled, "sum", "fsdp"))
    graph.output((graph.call_function(c10d.wait_tensor.default, (launched,)), weight))
    return GraphModule({}, graph)


def program_of(module: GraphModule) -> GraphProgram:
    return GraphProgram(
        module=module,
        run=module,
        parameter_names=["weight"],
        buffer_names=[],
        code_hash=code_hash(module),
        groups={"fsdp2": Group("fsdp2", ((0, 1),), high_priority=True)},
        trace_seconds=1.0,
        passes=[PassReport("clean_up", 1.0, 5, 5)],
        layout=(Layout("weight", "float32", (4, 2)),),
    )


class Made:
    """What stands for tracing and passes here, and counts them."""

    def __init__(self, bakes: bool = False, function: Any = aten.mul.Tensor) -> None:
        self.bakes = bakes
        self.function = function
        self.ranks: list[int] = []

    def trace(self, case: Any, device: Any, enter: Any = None, system: str = "graph", rank: int = 0) -> TracedStep:
        self.ranks.append(rank)
        joint: Any = type("Joint", (), {"module": step_of(rank * self.bakes, self.function)})
        return TracedStep(joint, 0.5, system)

    def finish(self, traced: TracedStep, *arguments: Any, **options: Any) -> GraphProgram:
        return program_of(traced.joint.module)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    found = Made()
    monkeypatch.setattr(artifact, "trace", found.trace)
    monkeypatch.setattr(artifact, "finish", found.finish)
    monkeypatch.setattr(fingerprint, "own_digest", lambda: "of our files")
    monkeypatch.setattr(artifact, "own_digest", lambda: "of our files")
    monkeypatch.setattr(artifact, "read_sources", lambda: Sources("", (), "of our files"))
    yield found


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what a file says, and make its hash right again: as somebody who knows the form would."""
    value = json.loads(json.dumps(file.read(folder).value))
    change(value)
    file.write(folder, value)


def test_a_step_is_read_as_the_program_that_was_made(made: Made, tmp_path: Path) -> None:
    reported = precompile(CASE, "graph", CPU, tmp_path)
    assert made.ranks == [7, 0] and reported.trace_seconds == (0.5, 0.5)
    found, program = read_program(tmp_path, CASE, "graph", CPU), program_of(step_of())
    assert found.module.code == program.module.code and found.run is found.module
    for name in ("parameter_names", "buffer_names", "groups", "code_hash", "layout", "is_kept"):
        assert getattr(found, name) == getattr(program, name)
    assert found.artifact == reported.artifact
    assert (found.artifact.ranks, found.artifact.nodes, found.artifact.groups) == (8, 5, 1)
    assert [entry.seconds for entry in found.passes] == [0.0], "no pass ran now"


def test_reading_traces_nothing_and_runs_no_pass(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precompile(CASE, "graph", CPU, tmp_path)

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing is traced")

    for module in (artifact, graph_system):
        for name in ("trace", "finish"):
            monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(graph_system, "run_pipeline", fail)
    monkeypatch.setattr(torch.fx.experimental.proxy_tensor, "make_fx", fail)
    assert read_program(tmp_path, replace(CASE, steps=1), "graph", CPU).code_hash == code_hash(step_of())


def test_a_coordinate_in_a_ranks_code_is_found_before_anything_runs_and_leaves_a_note(
    made: Made, tmp_path: Path
) -> None:
    precompile(CASE, "graph", CPU, tmp_path)
    made.bakes = True
    with pytest.raises(ArtifactError) as error:
        precompile(CASE, "graph", CPU, tmp_path)
    first, last = code_hash(step_of())[:16], code_hash(step_of(7))[:16]
    assert str(error.value) == (
        "ArtifactError: the step of case moe_seq is not the same on every rank: a rank's own coordinate stands in its "
        "code\n"
        "  expected: one code for all ranks; rank 0 has mul_tensor = torch.ops.aten.mul.Tensor(weight, 2.0)\n"
        "  found: rank 7 has mul_tensor = torch.ops.aten.mul.Tensor(weight, 9.0)\n"
        f"  came from: code hashes {first} of rank 0, {last} of rank 7\n"
        "  fix: read the coordinate from a buffer that each rank owns, and trace the step again\n"
        "  replay: bitproof precompile moe_seq"
    )
    with pytest.raises(ArtifactError, match="was not finished, and what was there before is not used"):
        read_program(tmp_path, CASE, "graph", CPU)


def test_one_rank_is_traced_once(made: Made, tmp_path: Path) -> None:
    precompile(replace(CASE, parallelism=Parallelism(world_size=1, ep=1)), "graph", CPU, tmp_path)
    assert made.ranks == [0]


def test_what_fails_leaves_a_note_of_it_in_place_of_an_older_step(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompile(CASE, "graph", CPU, tmp_path)

    def fail(*arguments: Any, **options: Any) -> None:
        raise TraceError("it cannot be traced")

    monkeypatch.setattr(artifact, "trace", fail)
    with pytest.raises(TraceError):
        precompile(CASE, "graph", CPU, tmp_path)
    with pytest.raises(ArtifactError, match="found: TraceError: it cannot be traced"):
        read_program(tmp_path, CASE, "graph", CPU)


def test_files_that_change_meanwhile_leave_no_step(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "own_digest", lambda: "before")
    with pytest.raises(ArtifactError, match="changed while it was made"):
        precompile(CASE, "graph", CPU, tmp_path)
    with pytest.raises(ArtifactError, match="was not finished"):
        file.read(tmp_path)


def test_an_operator_that_is_not_allowed_is_refused_where_it_is_written_and_where_it_is_read(
    made: Made, tmp_path: Path
) -> None:
    made.function = aten.atan2.default
    with pytest.raises(ArtifactError, match=r"has no form as data(.|\n)*found: aten.atan2.default"):
        precompile(CASE, "graph", CPU, tmp_path)
    made.function = aten.mul.Tensor
    precompile(CASE, "graph", CPU, tmp_path)

    def change(value: Any) -> None:
        value["program"]["graph"]["nodes"][1][2] = "aten.from_file.default"

    rewrite(tmp_path, change)
    with pytest.raises(ArtifactError) as error:
        read_program(tmp_path, CASE, "graph", CPU)
    assert "an operator that is not allowed" in error.value.what and error.value.found == "aten.from_file.default"


def _other_code(value: Any) -> None:
    value["program"]["graph"]["nodes"][1][4]["tuple"][1] = 3.0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_other_code, "it has other code than was kept"),
        (lambda value: value["program"].pop("groups"), "KeyError: 'groups'"),
        (lambda value: value.pop("layout"), "KeyError: 'layout'"),
        (lambda value: value["layout"][0].__setitem__(0, "bias"), "of other parameters and buffers than its graph's"),
        (lambda value: value["program"]["parameter_names"].append("bias"), "of other parameters and buffers"),
        (lambda value: value.update(compiled="c" * 64), "it has compiled code"),
        (lambda value: value["program"]["graph"]["nodes"][0].__setitem__(2, "x: 1"), "invalid name 'x: 1'"),
        (lambda value: value["program"]["graph"]["nodes"][0].__setitem__(2, "None"), "invalid name 'None'"),
        (lambda value: value["program"]["graph"]["nodes"][1].__setitem__(5, {"dict": {"a=f(),b": 1}}), "options"),
        (lambda value: value["program"]["graph"]["nodes"][1].__setitem__(4, {"tuple": [{"node": -1}]}), "IndexError"),
    ],
)
def test_a_forged_file_whose_hash_is_right_is_refused_before_its_code_runs(
    change: Any, found: str, made: Made, tmp_path: Path
) -> None:
    precompile(CASE, "graph", CPU, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ArtifactError) as error:
        read_program(tmp_path, CASE, "graph", CPU)
    assert "the precompiled step says no program" in str(error.value) and found in str(error.value)


def test_every_refusal_says_how_the_step_is_made_and_the_run_replayed(made: Made, tmp_path: Path) -> None:
    precompile(CASE, "graph", CPU, tmp_path)
    with pytest.raises(ArtifactError) as error:
        read_program(tmp_path, replace(CASE, parallelism=Parallelism(world_size=4)), "graph", CPU)
    assert str(error.value) == (
        "ArtifactError: the precompiled step was made for something else: world size\n"
        "  expected: world_size=4, as this run has it\n"
        "  found: world_size=8\n"
        f"  came from: {tmp_path / file.NAME}\n"
        f"  fix: bitproof precompile moe_seq --out {tmp_path}, with this run's options\n"
        f"  replay: bitproof run -k moe_seq --precompiled {tmp_path}"
    )


@pytest.mark.parametrize("name", ["form", "torch", "python", "sources", "passes", "backend"])
def test_each_field_of_a_file_is_held_against_the_run(name: str, made: Made, tmp_path: Path) -> None:
    precompile(CASE, "graph", CPU, tmp_path)
    rewrite(tmp_path, lambda value: value["fingerprint"].update({name: "another"}))
    with pytest.raises(ArtifactError, match=f"something else: {name}"):
        read_program(tmp_path, CASE, "graph", CPU)


def test_fields_in_another_order_are_the_same_fields(made: Made, tmp_path: Path) -> None:
    reported = precompile(CASE, "graph", CPU, tmp_path).artifact
    rewrite(tmp_path, lambda value: value.update(fingerprint=dict(reversed(value["fingerprint"].items()))))
    assert read_program(tmp_path, CASE, "graph", CPU).artifact.fingerprint == reported.fingerprint


def test_compiled_code_is_run_for_who_says_so_and_is_held_against_its_hash(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, pipeline=Pipeline(backend="inductor"))
    asked: list[object] = []
    monkeypatch.setattr(artifact.compiled, "write", lambda run, folder: "c" * 64)
    monkeypatch.setattr(artifact.compiled, "read", lambda *given: asked.append(given[1:]) or "what was compiled")
    reported = precompile(case, "graph", CPU, tmp_path)
    assert reported.artifact.compiled == "c" * 64
    found = read_program(tmp_path, case, "graph", CPU, trust_compiled=True)
    assert found.run == "what was compiled" and found.artifact == reported.artifact
    assert asked == [("c" * 64, found.passes, True)]
    rewrite(tmp_path, lambda value: value.update(compiled=None))
    with pytest.raises(ArtifactError, match="it has no compiled code"):
        read_program(tmp_path, case, "graph", CPU, trust_compiled=True)


def test_code_compiled_for_a_gpu_is_not_precompiled(made: Made, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="is compiled for cuda, and such code is not precompiled"):
        precompile(replace(CASE, pipeline=Pipeline(backend="inductor")), "graph", torch.device("cuda"), tmp_path)


def test_a_fault_that_no_rank_has_for_itself_is_no_trial_of_the_comparison(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precompiling knows no fault flip-bit"):
        precompile(CASE, "graph", CPU, tmp_path, "flip-bit")
    with pytest.raises(ArtifactError, match="was not finished"):
        file.read(tmp_path)


@pytest.mark.slow
def test_real_steps_of_all_ranks_are_one_code_until_a_coordinate_is_baked_in(tmp_path: Path) -> None:
    case = replace(small(CASES["precompiled_dp4_tp2_ep4"]), parallelism=Parallelism(world_size=4, tp=2, ep=2))
    reported = precompile(case, "graph", CPU, tmp_path)
    found = read_program(tmp_path, case, "graph", CPU)
    assert found.artifact == reported.artifact
    struck = mutate(CATALOGUE["baked-coordinate"], found.module, case)
    assert struck.module.code.count("full_like.default") > found.module.code.count("full_like.default") > 0
    with pytest.raises(ArtifactError, match=r"rank 3 has full_like\S* = torch.ops.aten.full_like.default\(\S+, 1\)"):
        precompile(case, "graph", CPU, tmp_path, "baked-coordinate")
    with pytest.raises(UsageError, match="the same on every rank"):
        precompile(case, "graph", CPU, tmp_path, "neighbours-share-of-the-tokens")
