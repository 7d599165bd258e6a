"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values are computed from a small latent per token. Separate dims, which are rotated, carry the position. All
heads share the rotated dims of the key.

B batch, S sequence, T folded tokens, D model dim, H heads, C latent dim (query or key/value), N head dim without
position, R head dim with position, Q query and key head dim (N + R), V value head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.document_mask import mask_mod_of, mask_of
from bitproof.reference.layers.experts import KEEPS_ROWS
from bitproof.reference.layers.rms_norm import RMSNorm
from bitproof.reference.layers.rope import RopeConfig, RotaryEmbedding

KERNEL_OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""Options of the compiled kernels, which need all of them. The first four are those of `flex_attention`.

The last two choose the forward's extra outputs: backward reads the logsumexp, and nothing reads the maxima. Eager
always returns both.
"""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Head dims, and the sizes of the latents (`q_lora_rank`, `kv_lora_rank`).

    If `q_lora_rank` is 0, queries have no latent and are projected straight from the model dim.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        scaling = self.rope.scaling
        return float(self.qk_head_dim**-0.5) * (scaling.attention_scale() if scaling else 1.0)


class LatentAttention(nn.Module):
    """Causal self-attention over keys and values that are expanded from a latent.

    The number of heads follows from the projections' sizes, so that a rank may have a part of the heads.
    """

    def __init__(self, dim: int, config: LatentAttentionConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads
        if config.q_lora_rank:
            self.wq_a = nn.Linear(dim, config.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(config.q_lora_rank, eps=config.norm_eps)
            self.wq_b = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        else:
            self.wq = nn.Linear(dim, heads * config.qk_head_dim, bias=False)
        self.wkv_a = nn.Linear(dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.wkv_b = nn.Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.wo = nn.Linear(heads * config.v_head_dim, dim, bias=False)
        self.rope = RotaryEmbedding(config.qk_rope_head_dim, config.rope)
        self.attend = attend

    def forward(self, x_BSD: Tensor, positions_BS: Tensor, attention_masks: object | None = None) -> Tensor:
        """Attend within each row of the batch. For folded tokens (T, D), attend within each document.

        Returns a tensor of x's shape and dtype.
        """
        q_BSHQ = self._queries(x_BSD, positions_BS)
        k_BSHQ, v_BSHV = self._keys_and_values(x_BSD, positions_BS)
        y_BSHV = self.attend(q_BSHQ, k_BSHQ, v_BSHV, scale=self.config.softmax_scale, attention_masks=attention_masks)
        y_BSD: Tensor = self.wo(y_BSHV.flatten(-2))
        return y_BSD

    def _queries(self, x_BSD: Tensor, positions_BS: Tensor) -> Tensor:
        config = self.config
        q = self.wq_b(self.q_norm(self.wq_a(x_BSD))) if config.q_lora_rank else self.wq(x_BSD)
        q_BSHQ = q.unflatten(-1, (-1, config.qk_head_dim))
        q_BSHN, q_BSHR = q_BSHQ.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return torch.cat((q_BSHN, self.rope(q_BSHR, positions_BS)), dim=-1)

    def _keys_and_values(self, x_BSD: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        latent_BSC, k_BSR = self.wkv_a(x_BSD).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent_BSC))
        kv_BSH = kv.unflatten(-1, (-1, config.qk_nope_head_dim + config.v_head_dim))
        k_BSHN, v_BSHV = kv_BSH.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        # A single head of rotated dims, which all heads share.
        k_BS1R = self.rope(k_BSR.unsqueeze(-2), positions_BS)
        as_they_are = [-1] * (k_BSR.dim() - 1)
        return torch.cat((k_BSHN, k_BS1R.expand(*as_they_are, k_BSHN.shape[-2], -1)), dim=-1), v_BSHV


def attend(q_BSHQ: Tensor, k_BSHQ: Tensor, v_BSHV: Tensor, *, scale: float, attention_masks: object | None) -> Tensor:
    """Return softmax(q k^T * scale) v over a query's own and earlier positions, or over those that a BlockMask allows.

    - Rows: returns (B, S, H, V). The kernel is FlexAttention with a BlockMask, and otherwise SDPA.
    - Folded tokens (T, H, ...): returns (T, H, V). `attention_masks` is an integer tensor (T,), with the index of the
      first token of each token's document.

    Raises CaseError for a mask of another type.
    """
    if q_BSHQ.dim() == 3:
        return _attend_folded(q_BSHQ, k_BSHQ, v_BSHV, scale, attention_masks)
    # Both kernels take heads before positions.
    q_BHSQ, k_BHSQ, v_BHSV = (x.transpose(1, 2) for x in (q_BSHQ, k_BSHQ, v_BSHV))
    if attention_masks is None:
        y_BHSV = functional.scaled_dot_product_attention(q_BHSQ, k_BHSQ, v_BHSV, is_causal=True, scale=scale)
    elif isinstance(attention_masks, BlockMask):
        y_BHSV = _flex_attention(q_BHSQ, k_BHSQ, v_BHSV, scale, attention_masks)
    else:
        raise CaseError(
            "attention masks of this type are not supported",
            expected="a BlockMask, or None, which means causal attention",
            found=type(attention_masks).__name__,
        )
    return y_BHSV.transpose(1, 2)


def _attend_folded(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor, scale: float, offsets_T: object | None) -> Tensor:
    if not isinstance(offsets_T, Tensor):
        raise CaseError(
            "only the offsets of documents keep folded tokens apart",
            expected="attention_masks: a tensor with the offset of each token's document",
            found=type(offsets_T).__name__,
        )
    # The annotation declares that a chunk computes the same rows as the whole. That holds if no document is in both
    # chunks.
    with annotate(KEEPS_ROWS):
        # Row-major copies: only for them is the stride of a dim of one element certain, which a proof needs.
        copies = (x.transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (q_THQ, k_THQ, v_THV))
        q_1HTQ, k_1HTQ, v_1HTV = (x_HT.unsqueeze(0) for x_HT in copies)
        mask = mask_of(offsets_T.unsqueeze(0))
        return _flex_attention(q_1HTQ, k_1HTQ, v_1HTV, scale, mask).squeeze(0).transpose(0, 1)


def _flex_attention(q_BHSQ: Tensor, k_BHSQ: Tensor, v_BHSV: Tensor, scale: float, mask: BlockMask) -> Tensor:
    # The operator is called directly: in eager it runs its reference math, and in a trace it is a single node. The
    # function `flex_attention` would compile with Dynamo on every eager call, warn about it, and refuse gradients on a
    # CPU, which is a limit of the compiled kernel and not of the operator.
    mask_mod = mask_mod_of(mask)
    y_BHSV, _, _ = torch.ops.higher_order.flex_attention(
        q_BHSQ,
        k_BHSQ,
        v_BHSV,
        same_score,
        (*mask.as_tuple()[:-1], mask_mod.function),
        scale,
        KERNEL_OPTIONS,
        (),
        mask_mod.captured,
    )
    return y_BHSV


def same_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score
