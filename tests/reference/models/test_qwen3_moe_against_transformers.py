"""The model computes what the published one computes: logits and gradients against another implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitproof.reference.init import initialize
from bitproof.reference.layers.grouped_query_attention import GroupedQueryConfig
from bitproof.reference.layers.moe import MoEConfig
from bitproof.reference.layers.rope import RopeConfig
from bitproof.reference.layers.router import RoutingConfig
from bitproof.reference.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from tests.reference.models.transformers_peer import (
    Tensors,
    assert_logits_and_gradients_agree,
    in_their_layout,
    with_halves_rotated,
)

transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")


def our_config(num_kv_heads: int) -> Qwen3MoEConfig:
    return Qwen3MoEConfig(
        dim=32,
        num_layers=2,
        vocab_size=96,
        attention=GroupedQueryConfig(
            num_heads=4,
            num_kv_heads=num_kv_heads,
            head_dim=16,
            rope=RopeConfig(max_seq_len=64, theta=1000.0),
            qk_norm=True,
        ),
        moe=MoEConfig(
            routing=RoutingConfig(num_experts=8, top_k=3, score="softmax", norm=True),
            hidden_dim=16,
            num_shared_experts=0,
        ),
    )


def their_model(config: Qwen3MoEConfig) -> Any:
    attention, moe = config.attention, config.moe
    theirs = transformers.Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        moe_intermediate_size=moe.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        num_experts=moe.routing.num_experts,
        num_experts_per_tok=moe.routing.top_k,
        norm_topk_prob=moe.routing.norm,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=attention.rope.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope.theta},
        attn_implementation="eager",
    )
    return transformers.Qwen3MoeForCausalLM(theirs).float()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_logits_and_gradients_agree_with_transformers(num_kv_heads: int) -> None:
    config = our_config(num_kv_heads)
    ours = Qwen3MoE(config)
    initialize(ours, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms start at one, where a permuted weight would go unseen
        for name, parameter in ours.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))

    def layout(tensors: Tensors) -> Tensors:
        return in_their_layout(with_halves_rotated(tensors, config.attention.head_dim))

    assert_logits_and_gradients_agree(ours, their_model(config), config.vocab_size, layout)
