"""The model computes what the published one computes: logits and gradients against another implementation.

E experts
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bitproof.reference.init import initialize
from bitproof.reference.layers.attention import LatentAttentionConfig
from bitproof.reference.layers.moe import MoEConfig
from bitproof.reference.layers.rope import RopeConfig, Yarn
from bitproof.reference.layers.router import RoutingConfig
from bitproof.reference.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from tests.reference.models.transformers_peer import NAMES, assert_logits_and_gradients_agree, in_their_layout

transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")

LATENT_NAMES = {
    **NAMES,
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
}


def our_config(*, q_lora_rank: int, yarn: Yarn | None, num_groups: int, top_groups: int) -> DeepSeekV3Config:
    return DeepSeekV3Config(
        dim=32,
        num_layers=3,
        num_dense_layers=1,
        vocab_size=96,
        dense_hidden_dim=64,
        attention=LatentAttentionConfig(
            num_heads=4,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=16,
            v_head_dim=8,
            rope=RopeConfig(max_seq_len=64, scaling=yarn),
        ),
        moe=MoEConfig(
            routing=RoutingConfig(
                num_experts=8,
                top_k=3,
                score="sigmoid",
                num_groups=num_groups,
                top_groups=top_groups,
                norm=True,
                scale=2.5,
            ),
            hidden_dim=16,
            num_shared_experts=2,
        ),
    )


def their_model(config: DeepSeekV3Config) -> Any:
    attention, moe, routing = config.attention, config.moe, config.moe.routing
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": attention.rope.theta}
    if yarn := attention.rope.scaling:
        assert isinstance(yarn, Yarn)
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_seq_len,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale,
        }
    theirs = transformers.DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.dense_hidden_dim,
        moe_intermediate_size=moe.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_heads,
        n_shared_experts=moe.num_shared_experts,
        n_routed_experts=routing.num_experts,
        routed_scaling_factor=routing.scale,
        kv_lora_rank=attention.kv_lora_rank,
        q_lora_rank=attention.q_lora_rank or None,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        qk_nope_head_dim=attention.qk_nope_head_dim,
        v_head_dim=attention.v_head_dim,
        n_group=routing.num_groups,
        topk_group=routing.top_groups,
        num_experts_per_tok=routing.top_k,
        first_k_dense_replace=config.num_dense_layers,
        norm_topk_prob=routing.norm,
        max_position_embeddings=attention.rope.max_seq_len,
        rope_parameters=rope,
        rope_interleave=True,
        num_nextn_predict_layers=0,
        attn_implementation="eager",
    )
    return transformers.DeepseekV3ForCausalLM(theirs).float()


YARN = Yarn(factor=4.0, original_seq_len=16, beta_fast=4.0, mscale=0.707)


@pytest.mark.parametrize("q_lora_rank", [0, 16], ids=["plain_queries", "query_latent"])
@pytest.mark.parametrize("yarn", [None, YARN], ids=["plain_rope", "yarn"])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2)], ids=["one_group", "group_limited"])
def test_logits_and_gradients_agree_with_transformers(
    q_lora_rank: int, yarn: Yarn | None, num_groups: int, top_groups: int
) -> None:
    config = our_config(q_lora_rank=q_lora_rank, yarn=yarn, num_groups=num_groups, top_groups=top_groups)
    ours, theirs = DeepSeekV3(config), their_model(config)
    initialize(ours, seed=0)
    draw = torch.Generator().manual_seed(0)
    for layer in (1, 2):
        bias_E = 0.2 * torch.randn(8, generator=draw)
        ours.get_buffer(f"layers.{layer}.moe.expert_bias").copy_(bias_E)
        theirs.get_buffer(f"model.layers.{layer}.mlp.gate.e_score_correction_bias").copy_(bias_E)
    layout = partial(in_their_layout, names=LATENT_NAMES)
    assert_logits_and_gradients_agree(ours, theirs, config.vocab_size, layout)
