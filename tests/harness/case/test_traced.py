"""What a case of the systems joint and precompiled may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import JOINT, Memory, Pipeline, refuse_unwritten
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


@pytest.mark.parametrize("policy", ["none", "selective", "offload", "full"])
def test_a_joint_case_may_bucket_recompute_and_offload(policy: Any) -> None:
    assert replace(CASE, memory=Memory(policy=policy), pipeline=Pipeline(bucket=True)).candidate == JOINT


@pytest.mark.parametrize(
    ("name", "changes", "reported"),
    [
        ("autoplace_llama3_fsdp2_tp2", {}, "is placed when the case runs"),
        ("moe_seq", {"observe": ("layers.*",)}, "shows activations"),
        ("pipeline_1f1b", {}, "is cut into stages when the case runs"),
    ],
)
def test_what_is_not_written_down_is_not_precompiled(name: str, changes: Any, reported: str) -> None:
    for accepted in ("moe_seq", "inductor_moe", "experts_seq_regional"):
        refuse_unwritten(CASES[accepted])
    with pytest.raises(CaseError, match=reported):
        refuse_unwritten(replace(CASES[name], **changes))


def test_a_prefix_of_the_passes_is_never_compiled() -> None:
    assert Pipeline(backend="inductor").compiles and Pipeline(backend="regional_inductor").compiles
    assert not Pipeline().compiles and not Pipeline(backend="inductor", until="chunk").compiles
