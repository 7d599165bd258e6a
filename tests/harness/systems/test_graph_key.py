"""The key of a kept graph: whatever decides the graph is in it, and tracing is shown nothing that is not."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitproof.builtin_cases.chunking import moe_seq, unchunked
from bitproof.harness.case import (
    AdamW,
    Autoplace,
    Batch,
    Case,
    Chunking,
    Memory,
    Model,
    Parallelism,
    Pipeline,
    Plan,
    Precision,
    Schedule,
)
from bitproof.harness.machine import gpus, torch_build
from bitproof.harness.machine.determinism import Switches, read_switches
from bitproof.harness.runtime.sources import Installation, Sources
from bitproof.harness.systems import graph_key
from bitproof.harness.systems.graph_key import graph_cache_of, traced_part

FOLDER = Path("graphs")
INSTALLED = Installation(Sources("files", ()), "others")

DECIDES: dict[str, Any] = {
    "chunking": Chunking(dim="seq", modules="layers.*.moe", early_grad_accumulation=True),
    "seed": 1,
    "model": Model(layers=2),
    "parallelism": Parallelism(world_size=2),
    "batch": Batch(sequences=8),
    "precision": Precision(compute="float32"),
    "memory": Memory(policy="full"),
    "pipeline": Pipeline(bucket=True),
    "observe": ("layers.*",),
}
DECIDES_NOTHING: dict[str, Any] = {
    "name": "another",
    "family": "another",
    "reference": "eager",
    "candidate": "eager_chunked",
    "expected": "CLOSE",
    "differs": (),
    "close_within": 0.5,
    "differs_within": None,
    "reference_parallelism": Parallelism(world_size=2),
    "resume_at": None,
    "resumes_reference": False,
    "requires": "cuda",
    "preload": ("json",),
    "options": {"of": ["its", "factory"]},
    "steps": 3,
    "grad_norm": True,
    "optimizer": AdamW(lr=1.0),
}


def key(case: Case = moe_seq, installed: Installation = INSTALLED) -> str:
    graph_cache = graph_cache_of(case, FOLDER, installed)
    assert graph_cache is not None
    return graph_cache.key


def test_each_system_has_a_graph_of_its_own() -> None:
    graph, joint = (graph_cache_of(moe_seq, FOLDER, INSTALLED, system) for system in ("graph", "joint"))
    assert graph is not None and joint is not None
    assert graph.key != joint.key
    assert graph.key == key()


def test_every_field_of_a_case_is_known_to_decide_the_graph_or_not_to() -> None:
    never_kept = {"schedule"}
    assert {field.name for field in fields(Case)} == DECIDES.keys() | DECIDES_NOTHING.keys() | {
        "autoplace"
    } | never_kept
    assert graph_cache_of(replace(moe_seq, schedule=Schedule(micro_batches=2)), FOLDER, INSTALLED) is None


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_the_graph_changes_the_key(name: str) -> None:
    other = replace(moe_seq, **{name: DECIDES[name]})
    assert getattr(other, name) != getattr(moe_seq, name) and key(other) != key()


def test_a_plan_of_placements_decides_the_graph() -> None:
    plans = (Plan(), Plan(replicated=("norm.weight",)), Plan(split=("layers.0.attention",)))
    keys = {key(replace(unchunked, autoplace=Autoplace(memory_mib=1.0, plan=plan))) for plan in plans}
    assert len(keys | {key(unchunked)}) == 4


def test_what_decides_nothing_is_not_shown_to_tracing_and_leaves_the_key() -> None:
    other = replace(moe_seq, **DECIDES_NOTHING, batch=replace(moe_seq.batch, data="some.txt"))
    assert traced_part(other) == traced_part(moe_seq)
    assert key(other) == key()


def test_a_case_of_users_that_goes_on_after_its_end_has_a_traced_part_too() -> None:
    mine = Case(name="mine", family="mine", reference="a:b", candidate="a:c", steps=4, resume_at=2)
    assert traced_part(mine).resume_at is None


def test_other_files_of_ours_of_torch_or_of_anybody_else_change_the_key() -> None:
    keys = {key(), key(installed=Installation(Sources("edited", ()), "others"))}
    keys.add(key(installed=Installation(Sources("files", ()), "edited")))
    assert len(keys) == 3


def _set(target: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, name, value)


@pytest.mark.parametrize(
    "change",
    [
        _set(torch, "__version__", "2.99.0"),
        _set(torch.version, "git_version", "0" * 40),
        _set(torch.__config__, "show", lambda: "built otherwise"),
        _set(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        _set(platform, "machine", lambda: "aarch64"),
        _set(sys, "version", "3.99"),
        _set(graph_key, "read_switches", lambda: read_switches() | {"mkldnn_enabled": False}),
        _set(graph_key, "environment_of_keys", lambda: {"ATEN_CPU_CAPABILITY": "avx2"}),
        _set(graph_key, "_FORM", 99),
    ],
    ids=["torch", "its commit", "its build", "processor", "machine", "python", "a switch", "environment", "form"],
)
def test_another_torch_machine_switch_or_variable_changes_the_key(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    change(monkeypatch)
    assert key() != before


def test_the_key_is_text_that_says_what_it_is_of() -> None:
    reported = json.loads(key())
    assert reported["case"]["parallelism"]["world_size"] == 8 and reported["device"] == "cpu"
    assert reported["torch"][0] == torch.__version__ and reported["sources"] == "files"


@pytest.mark.parametrize(
    ("pipeline", "is_kept"),
    [
        (Pipeline(), True),
        (Pipeline(overlap=True), True),
        (Pipeline(overlap=True, overlap_costs="mine.json"), False),
        (Pipeline(backend="inductor"), False),
        (Pipeline(backend="inductor", until="chunk"), True),
    ],
)
def test_compiled_graphs_and_such_as_follow_a_file_of_the_users_have_no_shelf(
    pipeline: Pipeline, is_kept: bool
) -> None:
    assert (graph_cache_of(replace(moe_seq, pipeline=pipeline), FOLDER, INSTALLED) is not None) == is_kept


def test_without_a_folder_or_a_process_that_looked_at_its_files_there_is_no_shelf() -> None:
    assert graph_cache_of(moe_seq, None, INSTALLED) is None and graph_cache_of(moe_seq, FOLDER, None) is None


GPU = SimpleNamespace(name="H100", multi_processor_count=132, major=9, minor=0, total_memory=80 << 30)


def key_of_gpu(rank: int = 0, index: int = 0) -> str:
    found = graph_cache_of(moe_seq, FOLDER, INSTALLED, device="cuda")
    assert found is not None
    return found.of_rank(rank, torch.device("cuda", index)).key


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(torch_build, "read_elsewhere", torch_build.read_here)


def _gpu(**facts: object) -> Callable[[pytest.MonkeyPatch], None]:
    other = SimpleNamespace(**vars(GPU) | facts)
    return _set(torch.cuda, "get_device_properties", lambda device: other)


@pytest.mark.parametrize(
    "change",
    [
        _gpu(name="H200"),
        _gpu(major=8),
        _gpu(minor=1),
        _gpu(multi_processor_count=114),
        _gpu(total_memory=94 << 30),
        _set(torch.version, "cuda", "13.0"),
        _set(torch.backends.cudnn, "version", lambda: 91000),
        _set(gpus, "driver_version", lambda file: "999.1"),
        lambda patch: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda patch: setattr(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic),
        lambda patch: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled()),
        lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "1"),
        lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "1,0"),
        lambda patch: patch.setenv("TORCH_NCCL_AVOID_RECORD_STREAMS", "1"),
    ],
)
def test_another_gpu_library_switch_or_variable_changes_a_ranks_key(
    change: Callable[[pytest.MonkeyPatch], None], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of_gpu()
    assert key_of_gpu() == before
    switches = Switches.now()
    try:
        change(monkeypatch)
        assert key_of_gpu() != before
    finally:
        switches.restore()


def test_each_rank_and_each_gpu_has_a_graph_of_its_own_and_a_cpus_is_one_for_all(gpu: None) -> None:
    assert len({key_of_gpu(rank, index) for rank in (0, 1) for index in (0, 1)}) == 4
    on_cpu = graph_cache_of(moe_seq, FOLDER, INSTALLED)
    assert on_cpu is not None and on_cpu.of_rank(1, torch.device("cpu")) is on_cpu
    assert json.loads(key_of_gpu())["of"] != on_cpu.key


def test_a_captured_graph_is_kept_for_a_cpu_alone() -> None:
    case = replace(moe_seq, pipeline=Pipeline(backend="cuda_graph"))
    assert graph_cache_of(case, FOLDER, INSTALLED) is not None
    assert graph_cache_of(case, FOLDER, INSTALLED, device="cuda") is None
