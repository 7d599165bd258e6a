"""Latent attention: its two ways to a query, its scale, and one place where kernels are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bitproof.harness.case import Chunking
from bitproof.harness.errors import CaseError
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.layers import attention
from bitproof.reference.layers.attention import LatentAttention, LatentAttentionConfig, attend
from bitproof.reference.layers.document_mask import document_mask
from bitproof.reference.layers.rope import RopeConfig, Yarn
from tests.harness.graph.graphs import bits

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


# -- FlexAttention ------------------------------------------------------------------------------------

B, S, H, Q, V = 4, 32, 2, 12, 16
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
HALF_PRECISION = {"rtol": 0.02, "atol": 0.03}  # its probabilities are rounded to 8 bits before they meet the values


def queries_keys_and_values(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, S, H, dim, generator=generator).to(dtype).requires_grad_() for dim in (Q, Q, V)]


def document_starts() -> Tensor:
    """Rows that begin with a document, amid one, with two short ones, and without any start."""
    starts_BS = torch.zeros(B, S, dtype=torch.bool)
    for row, column in [(0, 0), (0, 20), (1, 7), (1, 31), (2, 0), (2, 1)]:
        starts_BS[row, column] = True
    return starts_BS


def dense(q: Tensor, k: Tensor, v: Tensor, starts_BS: Tensor, scale: float) -> Tensor:
    """Softmax over a boolean mask written out, token by token."""
    seen = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for row in range(B):
        for query in range(S):
            for key in range(query, -1, -1):
                seen[row, 0, query, key] = True
                if starts_BS[row, key]:
                    break
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [128, 8])
def test_flex_attention_is_dense_attention_under_the_same_mask(dtype: torch.dtype, block_size: int) -> None:
    inputs, starts_BS = queries_keys_and_values(dtype), document_starts()
    mask = document_mask(starts_BS, block_size)
    found = attend(*inputs, scale=0.3, attention_masks=mask)
    expected = dense(*inputs, starts_BS, 0.3)
    close = HALF_PRECISION if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **close)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for gradient, wanted in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(gradient, wanted, **close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flex_attention_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    def once() -> list[Tensor]:
        inputs = queries_keys_and_values(dtype)
        y = attend(*inputs, scale=0.3, attention_masks=document_mask(document_starts()))
        return [y, *torch.autograd.grad(y.sum(), inputs)]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(bits(first), bits(second))


def test_without_document_starts_flex_attention_is_causal_attention() -> None:
    inputs = queries_keys_and_values(torch.float64)
    mask = document_mask(torch.zeros(B, S, dtype=torch.bool))
    torch.testing.assert_close(
        attend(*inputs, scale=0.3, attention_masks=mask), attend(*inputs, scale=0.3, attention_masks=None)
    )


def test_another_document_changes_no_bit() -> None:
    q, k, v = queries_keys_and_values(torch.float32)
    mask = document_mask(document_starts())
    before = attend(q, k, v, scale=0.3, attention_masks=mask)
    with torch.no_grad():
        k[0, 5], v[0, 5] = 7.0, 7.0
    after = attend(q, k, v, scale=0.3, attention_masks=mask)
    assert torch.equal(before[0, 20:], after[0, 20:])
    assert not torch.equal(before[0, 5:20], after[0, 5:20])


def test_half_a_mask_over_half_a_batch_has_the_bits_of_the_halfs_own_mask() -> None:
    block = Attending()
    chunk_modules(nn.ModuleDict({"block": block}), Chunking(dim="batch", modules="block"))
    x_BSD = torch.randn(B, S, 16, generator=torch.Generator().manual_seed(0))
    starts_BS = document_starts()
    whole = block(x_BSD, attention_masks=document_mask(starts_BS))
    for rows in (slice(0, 2), slice(2, 4)):
        alone = Attending().forward(x_BSD[rows], attention_masks=document_mask(starts_BS[rows]))
        assert torch.equal(bits(whole[rows]), bits(alone))


# -- folded tokens ------------------------------------------------------------------------------------

OFFSETS = torch.tensor([0] * 5 + [5] * 20 + [25] * 7)


def folded() -> list[Tensor]:
    """Queries, keys and values of one row, (T, H, Q)."""
    return [x[0].detach().requires_grad_() for x in queries_keys_and_values(torch.float64)]


def test_folded_attention_is_causal_attention_within_each_document() -> None:
    q, k, v = folded()
    found = attend(q, k, v, scale=0.3, attention_masks=OFFSETS)
    assert found.shape == (S, H, V)
    for tokens in (slice(0, 5), slice(5, 25), slice(25, 32)):
        alone = attend(*(x[tokens].unsqueeze(0) for x in (q, k, v)), scale=0.3, attention_masks=None)
        torch.testing.assert_close(found[tokens], alone[0])


def test_another_folded_document_changes_no_bit() -> None:
    q, k, v = folded()
    before = attend(q, k, v, scale=0.3, attention_masks=OFFSETS)
    with torch.no_grad():
        k[3], v[3] = 7.0, 7.0
    after = attend(q, k, v, scale=0.3, attention_masks=OFFSETS)
    assert torch.equal(before[5:], after[5:]) and not torch.equal(before[3:5], after[3:5])


def test_folded_attention_without_offsets_is_refused() -> None:
    with pytest.raises(CaseError) as refused:
        attend(*folded(), scale=0.3, attention_masks=None)
    assert str(refused.value) == (
        "CaseError: only the offsets of documents keep folded tokens apart\n"
        "  expected: attention_masks: a tensor with the offset of each token's document\n"
        "  found: NoneType"
    )


class Attending(nn.Module):
    """Attention of x with itself."""

    def forward(self, x_BSD: Tensor, attention_masks: object | None = None) -> Tensor:
        x_BSHQ = x_BSD.unsqueeze(2)
        return attend(x_BSHQ, x_BSHQ, x_BSHQ, scale=0.3, attention_masks=attention_masks).flatten(2)


def test_attend_refuses_a_mask_of_another_type() -> None:
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(CaseError) as refusal:
        attend(x, x, x, scale=1.0, attention_masks=torch.ones(2, 2))
    assert str(refusal.value) == (
        "CaseError: attention masks of this type are not supported\n"
        "  expected: a BlockMask, or None, which means causal attention\n"
        "  found: Tensor"
    )


def test_compiled_kernels_get_every_option_that_torchs_own_call_gives_them():
    """Without PRESCALE_QK, for one, no kernel compiles. BACKEND may be left out."""
    from torch.nn.attention import flex_attention

    x = torch.ones(1, 1, 1, 1)
    own = flex_attention._apply_kernel_options(x, x, x, True, None)
    own.pop("BACKEND", None)
    assert own.items() <= attention.KERNEL_OPTIONS.items()
