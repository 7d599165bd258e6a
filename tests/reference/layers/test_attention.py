"""Latent attention: its two ways to a query, its scale, and one place where kernels are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.errors import CaseError
from reference.layers.attention import LatentAttention, LatentAttentionConfig, attend
from reference.layers.rope import RopeConfig, Yarn

CONFIG = LatentAttentionConfig(
    num_heads=2,
    q_lora_rank=16,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=16,
    rope=RopeConfig(max_seq_len=16),
)


def weights(config: LatentAttentionConfig) -> set[str]:
    return {name.split(".")[0] for name, _ in LatentAttention(32, config).named_parameters()}


def test_queries_come_through_a_latent_unless_its_rank_is_zero() -> None:
    shared = {"wkv_a", "kv_norm", "wkv_b", "wo"}
    assert weights(CONFIG) == shared | {"wq_a", "q_norm", "wq_b"}
    assert weights(replace(CONFIG, q_lora_rank=0)) == shared | {"wq"}


@pytest.mark.parametrize("batch", [1, 2])
def test_head_dims_that_differ_keep_the_models_shape(batch: int) -> None:
    x_BSD = torch.ones(batch, 5, 32)
    assert LatentAttention(32, CONFIG)(x_BSD, torch.arange(5).repeat(batch, 1)).shape == (batch, 5, 32)


def test_the_softmax_scale_takes_yarn_in() -> None:
    yarn = Yarn(factor=4.0, original_seq_len=8)
    assert CONFIG.softmax_scale == 12**-0.5
    stretched = replace(CONFIG, rope=replace(CONFIG.rope, scaling=yarn))
    assert stretched.softmax_scale == 12**-0.5 * yarn.attention_scale()


def test_attend_is_causal_and_scaled() -> None:
    q, k, v = torch.randn(3, 2, 4, 3, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 0.3
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)
    torch.testing.assert_close(attend(q, k, v, scale=0.3, attention_masks=None), expected)


def test_attend_refuses_a_mask() -> None:
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(CaseError, match="attention masks are not supported yet"):
        attend(x, x, x, scale=1.0, attention_masks=object())
