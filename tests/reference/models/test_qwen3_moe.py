"""Qwen3-MoE's tree: experts in every layer, none shared, and norms within attention."""

from __future__ import annotations

import torch

from bitproof.harness.case import Model
from bitproof.reference.init import initialize
from bitproof.reference.models import build_model, model_config


def test_every_layer_has_routed_experts_alone_and_head_norms() -> None:
    tiny = build_model(Model(family="qwen3_moe"))
    assert {name.removeprefix("layers.1.") for name in tiny.state_dict() if name.startswith("layers.1.")} == {
        "attention_norm.weight",
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo", "q_norm", "k_norm")),
        "ffn_norm.weight",
        "moe.expert_bias",
        "moe.tokens_per_expert",
        "moe.router.weight",
        *(f"moe.experts.{name}" for name in ("w1", "w2", "w3")),
    }
    assert "layers.0.moe.router.weight" in tiny.state_dict()


def test_every_flavor_routes_by_a_normalized_softmax_over_all_experts() -> None:
    for flavor in ("tiny", "debugmodel", "30B-A3B", "235B-A22B"):
        routing = model_config(Model(family="qwen3_moe", flavor=flavor)).moe.routing
        assert (routing.score, routing.norm, routing.scale, routing.num_groups) == ("softmax", True, 1.0, 1)


def test_a_tokens_weights_sum_to_one() -> None:
    tiny = build_model(Model(family="qwen3_moe"))
    initialize(tiny, seed=0)
    moe = tiny.get_submodule("layers.0.moe")
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(moe.router(x_TD, moe.expert_bias).weights_TK.sum(1), torch.ones(5))
