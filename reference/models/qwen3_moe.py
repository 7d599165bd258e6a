"""Qwen3-MoE (arXiv:2505.09388): grouped-query attention with normalized heads, and experts in every layer.

Routing is a softmax over all experts; the top k weights are divided by their sum. There are no shared experts. A bias
balances the experts; while it is zero, as at the start, routing is as published.

Rotation pairs even with odd elements of a head. Published checkpoints pair the halves of a head. So their query and key
rows, and the weights of the heads' norms, have another order.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.reference.layers.decoder import Block, Decoder
from bitproof.reference.layers.grouped_query_attention import GroupedQueryAttention, GroupedQueryConfig
from bitproof.reference.layers.moe import MoE, MoEConfig
from bitproof.reference.layers.rope import RopeConfig
from bitproof.reference.layers.router import RoutingConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig:
    """The dimensions of a flavor of the model."""

    dim: int
    num_layers: int
    vocab_size: int
    attention: GroupedQueryConfig
    moe: MoEConfig
    norm_eps: float = 1e-6


class Qwen3MoE(Decoder):
    """Qwen3-MoE. Maps token and position ids to logits in the parameters' dtype; with labels, to the mean loss."""

    def __init__(self, config: Qwen3MoEConfig) -> None:
        blocks = (_block(config) for _ in range(config.num_layers))
        super().__init__(config.vocab_size, config.dim, blocks, norm_eps=config.norm_eps)
        self.config = config


def _block(config: Qwen3MoEConfig) -> Block:
    attention = GroupedQueryAttention(config.dim, config.attention)
    return Block(config.dim, attention, MoE(config.dim, config.moe), norm_eps=config.norm_eps)


def _tiny() -> Qwen3MoEConfig:
    # Dims of elementwise kernels are multiples of 64.
    return _config(
        dim=64,
        num_layers=2,
        vocab_size=264,
        heads=(4, 2, 16),
        experts=(8, 3, 64),
        max_seq_len=512,
    )


def _debugmodel() -> Qwen3MoEConfig:
    return _config(dim=256, num_layers=6, vocab_size=2048, heads=(4, 2, 128), experts=(16, 4, 256), max_seq_len=4096)


def _config(
    *,
    dim: int,
    num_layers: int,
    heads: tuple[int, int, int],
    experts: tuple[int, int, int],
    vocab_size: int = 151936,
    max_seq_len: int = 16384,
) -> Qwen3MoEConfig:
    """Return the configuration of one size.

    - `heads`: (number of query heads, number of key/value heads, head dim).
    - `experts`: (number of experts, top k, hidden dim).
    - `max_seq_len`: rows of the rotary tables, fewer than published.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_experts, top_k, hidden_dim = experts
    return Qwen3MoEConfig(
        dim=dim,
        num_layers=num_layers,
        vocab_size=vocab_size,
        attention=GroupedQueryConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=RopeConfig(max_seq_len=max_seq_len, theta=1000000.0),
            qk_norm=True,
        ),
        moe=MoEConfig(
            routing=RoutingConfig(num_experts=num_experts, top_k=top_k, score="softmax", norm=True),
            hidden_dim=hidden_dim,
            num_shared_experts=0,
        ),
    )


FLAVORS: dict[str, Qwen3MoEConfig] = {
    "tiny": _tiny(),
    "debugmodel": _debugmodel(),
    "30B-A3B": _config(dim=2048, num_layers=48, heads=(32, 4, 128), experts=(128, 8, 768)),
    "235B-A22B": _config(dim=4096, num_layers=94, heads=(64, 4, 128), experts=(128, 8, 1536)),
}
