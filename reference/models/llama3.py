"""Llama 3 (arXiv:2407.21783): dense, with grouped-query attention and the frequency scaling of release 3.1.

As in Meta's checkpoints, rotation pairs even with odd elements of a head. Checkpoints of transformers have another
order.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.reference.layers.decoder import Block, Decoder
from bitproof.reference.layers.feed_forward import FeedForward
from bitproof.reference.layers.grouped_query_attention import GroupedQueryAttention, GroupedQueryConfig
from bitproof.reference.layers.rope import Llama3Scaling, RopeConfig


@dataclass(frozen=True, kw_only=True)
class Llama3Config:
    """The dimensions of a flavor of the model."""

    dim: int
    num_layers: int
    vocab_size: int
    hidden_dim: int
    attention: GroupedQueryConfig
    norm_eps: float = 1e-5


class Llama3(Decoder):
    """Llama 3. Maps token and position ids to logits in the parameters' dtype; with labels, to the mean loss."""

    def __init__(self, config: Llama3Config) -> None:
        blocks = (_block(config) for _ in range(config.num_layers))
        super().__init__(config.vocab_size, config.dim, blocks, norm_eps=config.norm_eps)
        self.config = config


def _block(config: Llama3Config) -> Block:
    attention = GroupedQueryAttention(config.dim, config.attention)
    return Block(config.dim, attention, FeedForward(config.dim, config.hidden_dim), norm_eps=config.norm_eps)


def _tiny() -> Llama3Config:
    # With four tensor-parallel ranks, each gets a single key/value head, and elementwise kernels still have dims that
    # are multiples of 64.
    return Llama3Config(
        dim=64,
        num_layers=2,
        vocab_size=264,
        hidden_dim=256,
        attention=GroupedQueryConfig(
            num_heads=8,
            num_kv_heads=4,
            head_dim=16,
            rope=RopeConfig(max_seq_len=512, theta=500000.0, scaling=Llama3Scaling(factor=8.0, original_seq_len=128)),
        ),
    )


def _debugmodel() -> Llama3Config:
    return _published(dim=512, num_layers=6, num_heads=4, num_kv_heads=2, hidden_dim=1536, vocab_size=2048)


def _published(
    *, dim: int, num_layers: int, num_heads: int, hidden_dim: int, num_kv_heads: int = 8, vocab_size: int = 128256
) -> Llama3Config:
    """Return the configuration of a published size, with the fields that are the same in all published sizes filled in.

    The rotary tables are shorter than the published 131,072 rows, which nothing here would use.
    """
    scaling = Llama3Scaling(factor=8.0, original_seq_len=8192)
    return Llama3Config(
        dim=dim,
        num_layers=num_layers,
        vocab_size=vocab_size,
        hidden_dim=hidden_dim,
        attention=GroupedQueryConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            rope=RopeConfig(max_seq_len=16384, theta=500000.0, scaling=scaling),
        ),
    )


FLAVORS: dict[str, Llama3Config] = {
    "tiny": _tiny(),
    "debugmodel": _debugmodel(),
    "8B": _published(dim=4096, num_layers=32, num_heads=32, hidden_dim=14336),
    "70B": _published(dim=8192, num_layers=80, num_heads=64, hidden_dim=28672),
    "405B": _published(dim=16384, num_layers=126, num_heads=128, hidden_dim=53248),
}
