"""The model computes what the published one computes: logits and gradients against another implementation."""

from __future__ import annotations

from typing import Any

import pytest

from bitproof.reference.init import initialize
from bitproof.reference.layers.grouped_query_attention import GroupedQueryConfig
from bitproof.reference.layers.rope import Llama3Scaling, RopeConfig
from bitproof.reference.models.llama3 import Llama3, Llama3Config
from tests.reference.models.transformers_peer import (
    Tensors,
    assert_logits_and_gradients_agree,
    in_their_layout,
    with_halves_rotated,
)

transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")

# Of the 8 pairs of a head of 16, one stays, two are blended and the others are divided.
SCALING = Llama3Scaling(factor=8.0, original_seq_len=32)


def our_config(num_kv_heads: int, scaling: Llama3Scaling | None) -> Llama3Config:
    rope = RopeConfig(max_seq_len=64, theta=500.0, scaling=scaling)
    return Llama3Config(
        dim=32,
        num_layers=2,
        vocab_size=96,
        hidden_dim=64,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=num_kv_heads, head_dim=16, rope=rope),
    )


def their_model(config: Llama3Config) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.attention.rope.theta}
    if scaling := config.attention.rope.scaling:
        assert isinstance(scaling, Llama3Scaling)
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_seq_len,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.attention.num_heads,
        num_key_value_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.attention.rope.max_seq_len,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(theirs).float()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain_rope", "scaled_rope"])
def test_logits_and_gradients_agree_with_transformers(num_kv_heads: int, scaling: Llama3Scaling | None) -> None:
    config = our_config(num_kv_heads, scaling)
    ours = Llama3(config)
    initialize(ours, seed=0)

    def layout(tensors: Tensors) -> Tensors:
        return in_their_layout(with_halves_rotated(tensors, config.attention.head_dim))

    assert_logits_and_gradients_agree(ours, their_model(config), config.vocab_size, layout)
