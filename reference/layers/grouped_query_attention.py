"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): several query heads share a key/value head.

B batch, S sequence, D model dim, H query heads, K key/value heads, G query heads per key/value head (H / K), Q head dim
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.attention import attend
from bitproof.reference.layers.rms_norm import RMSNorm
from bitproof.reference.layers.rope import RopeConfig, RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig:
    """Heads and their dim. With `qk_norm`, each query and key head is normalized before its rotation, as in Qwen3."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads or self.num_heads < 1:
            raise CaseError(
                "query heads must share key/value heads evenly",
                expected="num_heads a multiple of num_kv_heads, both at least 1",
                found=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
            )


class GroupedQueryAttention(nn.Module):
    """Causal self-attention in which query head h reads key/value head h // G.

    It may have only a part of the heads, as under tensor parallelism: a range of key/value heads, with the query heads
    that read them.
    """

    def __init__(self, dim: int, config: GroupedQueryConfig) -> None:
        super().__init__()
        self.config = config
        self.wq = nn.Linear(dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, dim, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.rope = RotaryEmbedding(config.head_dim, config.rope)
        self.attend = attend

    def forward(self, x_BSD: Tensor, positions_BS: Tensor, attention_masks: object | None = None) -> Tensor:
        """Attend within each row of the batch. For folded tokens (T, D), attend within each document.

        Returns a tensor of x's shape and dtype.
        """
        q_BSHQ, k_BSKQ, v_BSKQ = (self._heads(projection(x_BSD)) for projection in (self.wq, self.wk, self.wv))
        if self.config.qk_norm:
            q_BSHQ, k_BSKQ = self.q_norm(q_BSHQ), self.k_norm(k_BSKQ)
        q_BSHQ, k_BSKQ = self.rope(q_BSHQ, positions_BS), self.rope(k_BSKQ, positions_BS)
        y_BSHQ = self.attend(
            q_BSHQ,
            self._shared(k_BSKQ),
            self._shared(v_BSKQ),
            scale=self.config.head_dim**-0.5,
            attention_masks=attention_masks,
        )
        y_BSD: Tensor = self.wo(y_BSHQ.flatten(-2))
        return y_BSD

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    def _shared(self, x_BSKQ: Tensor) -> Tensor:
        # Each key/value head is repeated for every query head that reads it.
        group = self.config.num_heads // self.config.num_kv_heads
        as_they_are = [-1] * (x_BSKQ.dim() - 1)
        return x_BSKQ.unsqueeze(-2).expand(*as_they_are, group, -1).flatten(-3, -2)
