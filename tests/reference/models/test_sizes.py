"""Flavors made smaller, and sizes that do not go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitproof.harness.case import Model
from bitproof.harness.errors import CaseError
from bitproof.reference.models import build_model, model_config
from bitproof.reference.models.sizes import sizes_of


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Model(), {"layers": 3, "dense_layers": 1, "experts": 8, "top_k": 3, "dim": 64, "heads": 4}),
        (
            Model(layers=1, dense_layers=0, experts=4, top_k=1, dim=8, heads=1),
            {"layers": 1, "dense_layers": 0, "experts": 4, "top_k": 1, "dim": 8, "heads": 1},
        ),
        (Model(layers=1), {"layers": 1, "dense_layers": 1, "experts": 8, "top_k": 3, "dim": 64, "heads": 4}),
        (Model(family="llama3", layers=1, heads=2), {"layers": 1, "dim": 64, "heads": 2}),
        (
            Model(family="qwen3_moe", experts=2, top_k=2),
            {"layers": 2, "experts": 2, "top_k": 2, "dim": 64, "heads": 4},
        ),
    ],
)
def test_a_model_has_the_sizes_that_its_case_states(model: Model, sizes: dict[str, int]) -> None:
    assert sizes_of(model_config(model)) == sizes


@pytest.mark.parametrize("family", ["deepseek_v3", "llama3", "qwen3_moe"])
def test_the_smallest_model_of_each_family_computes(family: str) -> None:
    model = build_model(Model(family=family, layers=1, dim=8, heads=1))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert model(tokens, torch.arange(3).expand(2, 3)).shape == (2, 3, 264)


def test_hidden_dims_and_key_value_heads_follow_in_proportion() -> None:
    config = model_config(Model(family="llama3", dim=32, heads=4))
    assert (config.hidden_dim, config.attention.num_kv_heads) == (128, 2)
    assert model_config(Model(family="llama3", heads=1)).attention.num_kv_heads == 1
    config = model_config(Model(dim=128))
    assert (config.dense_hidden_dim, config.moe.hidden_dim) == (256, 128)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"family": "llama3", "experts": 4, "dense_layers": 1},
            "CaseError: llama3 has no dense_layers and no experts\n"
            "  expected: dim, heads, layers\n"
            "  found: dense_layers=1, experts=4",
        ),
        (
            {"layers": 1, "dense_layers": 2},
            "CaseError: dense layers come first and cannot outnumber the layers\n"
            "  expected: num_layers >= 1 and 0 <= num_dense_layers <= num_layers\n"
            "  found: num_layers=1, num_dense_layers=2",
        ),
        (
            {"experts": 4},
            "CaseError: the eligible groups must hold enough experts\n"
            "  expected: 1 <= top_k <= top_groups * num_experts / num_groups\n"
            "  found: top_k=3, 2 groups of 1",
        ),
        (
            {"experts": 6},
            "CaseError: expert groups must be of equal size\n"
            "  expected: num_groups >= 1 that divides num_experts\n"
            "  found: num_experts=6, num_groups=4",
        ),
        (
            {"flavor": "uneven", "dim": 8},
            "CaseError: a hidden dim cannot follow the model dim in proportion\n"
            "  expected: a dim for which dim x 132 / 64 is a whole number\n"
            "  found: dim=8",
        ),
        (
            {"dim": 12},
            "CaseError: the model dim does not suit the kernels of grouped matrix products, whose rows are multiples "
            "of 16 bytes\n  expected: a multiple of 8\n  found: dim=12",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(CaseError) as refusal:
        model_config(Model(**settings))
    assert str(refusal.value) == text
