"""What a case of the systems joint and precompiled may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import JOINT, Chunking, Memory, Pipeline, refuse_unwritten
from bitproof.harness.errors import CaseError

CASE = CASES["joint_llama3_fsdp4_tp2"]


def test_regions_are_patterns_for_the_backend_that_compiles_regions() -> None:
    assert Pipeline(backend="regional_inductor", regions=("layers.*.moe", "norm")).regions
    with pytest.raises(CaseError) as error:
        Pipeline(regions=("layers.*.moe",))
    assert str(error.value) == (
        "CaseError: regions are marked for a backend that compiles none\n"
        "  expected: backend='regional_inductor' with regions=(...), or regions=()\n"
        "  found: backend='fx', regions=('layers.*.moe',)"
    )
    with pytest.raises(CaseError, match="a region's pattern is a dotted module name"):
        Pipeline(backend="regional_inductor", regions=("layers.[0]",))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_joint_case_may_bucket_and_recompute(policy: Any) -> None:
    assert replace(CASE, memory=Memory(policy=policy), pipeline=Pipeline(bucket=True)).candidate == JOINT


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"memory": Memory(policy="offload")}, "memory.policy='offload'"),
        ({"pipeline": Pipeline(overlap=True)}, "pipeline.overlap"),
        ({"pipeline": Pipeline(async_tensor=True)}, "pipeline.async_tensor"),
        ({"pipeline": Pipeline(overlap=True), "memory": Memory(policy="offload")}, "pipeline.overlap, memory.policy"),
    ],
)
def test_what_only_a_traced_graph_does_is_refused_by_name(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(CaseError) as error:
        replace(CASE, **changes)
    assert str(error.value).startswith(
        "CaseError: case joint_llama3_fsdp4_tp2 asks the system joint for what it does not do\n"
        "  expected: no chunks, so no overlap of their exchanges; memory by the policies none, selective or full\n"
        f"  found: {found}"
    )
    assert str(error.value).endswith("\n  fix: leave it out, or choose the system graph")


def test_chunks_are_refused_on_either_side() -> None:
    chunked = replace(CASES["moe_seq"], parallelism=CASE.parallelism, reference="eager", candidate="eager_chunked")
    assert chunked.chunking == Chunking(dim="seq", modules="layers.*.moe")
    for side in ("reference", "candidate"):
        with pytest.raises(CaseError, match=r"asks the system joint[^\n]*\n[^\n]*\n  found: chunking\n"):
            replace(chunked, **{side: JOINT})


@pytest.mark.parametrize(
    ("name", "changes", "reported"),
    [
        ("autoplace_llama3_fsdp2_tp2", {}, "is placed when the case runs"),
        ("moe_seq", {"observe": ("layers.*",)}, "shows activations"),
        ("regional_inductor", {}, "compiled regions are not precompiled"),
        ("pipeline_1f1b", {}, "is cut into stages when the case runs"),
    ],
)
def test_what_is_not_written_down_is_not_precompiled(name: str, changes: Any, reported: str) -> None:
    for accepted in ("moe_seq", "inductor_moe"):
        refuse_unwritten(CASES[accepted])
    with pytest.raises(CaseError, match=reported):
        refuse_unwritten(replace(CASES[name], **changes))


def test_a_prefix_of_the_passes_is_never_compiled() -> None:
    assert Pipeline(backend="inductor").compiles and Pipeline(backend="regional_inductor").compiles
    assert not Pipeline().compiles and not Pipeline(backend="inductor", until="chunk").compiles
