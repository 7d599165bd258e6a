"""From a case's model to a module, by name."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Model
from bitproof.harness.errors import CaseError
from bitproof.reference.models import FAMILIES, build_model, model_config


def test_a_model_is_built_as_its_configuration_says() -> None:
    model = build_model(Model(family="deepseek_v3", flavor="tiny"))
    assert model.config is model_config(Model(family="deepseek_v3", flavor="tiny"))


def test_an_unknown_flavor_is_refused_listing_the_known_ones() -> None:
    with pytest.raises(CaseError) as refusal:
        build_model(Model(flavor="Tiny"))
    assert str(refusal.value) == (
        "CaseError: unknown flavor of deepseek_v3: 'Tiny'\n"
        "  expected: one of tiny, uneven, many_experts, dense, debugmodel, 16B, 671B"
    )


def test_an_unknown_family_is_refused_listing_the_known_ones() -> None:
    with pytest.raises(CaseError) as refusal:
        model_config(Model(family="deepseek", flavor="tiny"))
    assert str(refusal.value) == (
        f"CaseError: unknown model family: 'deepseek'\n  expected: one of {', '.join(FAMILIES)}"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tiny_and_a_debug_flavor(family: str) -> None:
    for flavor in ("tiny", "debugmodel"):
        assert model_config(Model(family=family, flavor=flavor)).num_layers >= 2


@pytest.mark.parametrize(
    ("family", "flavor", "published"),
    [
        ("deepseek_v3", "16B", 15.7e9),
        ("deepseek_v3", "671B", 671e9),
        ("llama3", "8B", 8.03e9),
        ("llama3", "70B", 70.6e9),
        ("llama3", "405B", 405.9e9),
        ("qwen3_moe", "30B-A3B", 30.5e9),
        ("qwen3_moe", "235B-A22B", 235.1e9),
    ],
)
def test_a_published_size_builds_on_the_meta_device_with_the_published_parameter_count(
    family: str, flavor: str, published: float
) -> None:
    with torch.device("meta"):
        model = build_model(Model(family=family, flavor=flavor))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(published, rel=0.003)
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
