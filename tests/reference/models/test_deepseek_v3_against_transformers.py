"""The model computes what the published one computes: logits and gradients against another implementation.

B batch, S sequence, E experts, H hidden dim of experts, D model dim
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reference.init import initialize
from reference.layers.attention import LatentAttentionConfig
from reference.layers.moe import MoEConfig
from reference.layers.rope import RopeConfig, Yarn
from reference.layers.router import RoutingConfig
from reference.loss import cross_entropy
from reference.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config

transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
    "attention": "self_attn",
    "feed_forward": "mlp",
    "moe": "mlp",
    "router": "gate",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "layers": "model.layers",
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


def in_their_layout(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters (or gradients) under their names; of the experts, gate and up are one tensor."""
    theirs = {}
    for name, value in ours.items():
        if ".experts.w" not in name:
            theirs[".".join(NAMES.get(part, part) for part in name.split("."))] = value
        elif name.endswith("w2"):
            theirs[their_experts(name) + ".down_proj"] = value
        elif name.endswith("w1"):
            up_EHD = ours[name.removesuffix("w1") + "w3"]
            theirs[their_experts(name) + ".gate_up_proj"] = torch.cat((value, up_EHD), dim=1)
    return theirs


def their_experts(name: str) -> str:
    return f"model.layers.{name.split('.')[1]}.mlp.experts"


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
    parameters = in_their_layout(dict(ours.named_parameters()))
    assert parameters.keys() == dict(theirs.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(parameters[name])

    tokens_BS = torch.randint(0, config.vocab_size, (2, 40), generator=draw)
    labels_BS = torch.randint(0, config.vocab_size, (2, 40), generator=draw)
    our_logits = ours(tokens_BS, torch.arange(40).repeat(2, 1))
    their_logits = theirs(tokens_BS, use_cache=False).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-4, atol=1e-5)

    cross_entropy(our_logits, labels_BS).backward()
    cross_entropy(their_logits, labels_BS).backward()
    our_grads = in_their_layout({name: value.grad for name, value in ours.named_parameters() if value.grad is not None})
    their_grads = {name: value.grad for name, value in theirs.named_parameters()}
    assert our_grads.keys() == their_grads.keys()
    # One dict at a time: a failure then names the parameter.
    torch.testing.assert_close(our_grads, their_grads, rtol=1e-3, atol=1e-6)
