"""DeepSeek-V3 (arXiv:2412.19437): latent attention, dense first layers, then mixtures of experts.

Multi-token prediction is left out: it would add much code, but no new kind of arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.attention import LatentAttention, LatentAttentionConfig
from bitproof.reference.layers.decoder import Block, Decoder
from bitproof.reference.layers.feed_forward import FeedForward
from bitproof.reference.layers.moe import MoE, MoEConfig
from bitproof.reference.layers.rope import RopeConfig, Yarn
from bitproof.reference.layers.router import RoutingConfig


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config:
    """The dimensions of a flavor of the model. The first `num_dense_layers` of `num_layers` layers have no experts."""

    dim: int
    num_layers: int
    num_dense_layers: int
    vocab_size: int
    dense_hidden_dim: int
    attention: LatentAttentionConfig
    moe: MoEConfig
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.num_dense_layers <= self.num_layers or self.num_layers < 1:
            raise CaseError(
                "dense layers come first and cannot outnumber the layers",
                expected="num_layers >= 1 and 0 <= num_dense_layers <= num_layers",
                found=f"num_layers={self.num_layers}, num_dense_layers={self.num_dense_layers}",
            )


class DeepSeekV3(Decoder):
    """DeepSeek-V3. Maps token and position ids to logits in the parameters' dtype; with labels, to the mean loss."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        blocks = (_block(config, layer) for layer in range(config.num_layers))
        super().__init__(config.vocab_size, config.dim, blocks, norm_eps=config.norm_eps)
        self.config = config


def _block(config: DeepSeekV3Config, layer: int) -> Block:
    is_dense = layer < config.num_dense_layers
    feed_forward = FeedForward(config.dim, config.dense_hidden_dim) if is_dense else MoE(config.dim, config.moe)
    attention = LatentAttention(config.dim, config.attention)
    return Block(config.dim, attention, feed_forward, norm_eps=config.norm_eps)


def _tiny() -> DeepSeekV3Config:
    # All features of the 671B model, except the query latent.
    return DeepSeekV3Config(
        # Dims of elementwise kernels are multiples of 64, so that no row count leaves a vector kernel a tail.
        dim=64,
        num_layers=3,
        num_dense_layers=1,
        vocab_size=264,
        dense_hidden_dim=128,
        attention=LatentAttentionConfig(
            num_heads=4,
            # A query latent would add six parameters to gather, and collectives take most of a CPU step.
            q_lora_rank=0,
            kv_lora_rank=32,
            # Query/key and value head dims are equal, so that attention on a CPU is a single flash kernel.
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            rope=RopeConfig(max_seq_len=512, scaling=Yarn(factor=4.0, original_seq_len=128)),
        ),
        moe=MoEConfig(
            routing=RoutingConfig(
                num_experts=8, top_k=3, score="sigmoid", num_groups=4, top_groups=2, norm=True, scale=2.5
            ),
            hidden_dim=64,
            num_shared_experts=1,
        ),
    )


def _uneven() -> DeepSeekV3Config:
    # Some shards are padded, as the number of ranks does not divide their rows. For example, five experts are sharded
    # over 4 ranks: rank 3 has only padding.
    tiny = _tiny()
    return replace(
        tiny,
        vocab_size=261,
        dense_hidden_dim=132,
        attention=replace(tiny.attention, kv_lora_rank=36),
        moe=replace(tiny.moe, routing=replace(tiny.moe.routing, num_experts=10, num_groups=5)),
    )


def _many_experts() -> DeepSeekV3Config:
    # More experts than a small batch has rows, so that most get none.
    tiny = _tiny()
    return replace(tiny, moe=replace(tiny.moe, routing=replace(tiny.moe.routing, num_experts=128)))


def _debugmodel() -> DeepSeekV3Config:
    # Narrow, but with published sizes of latents and heads.
    return DeepSeekV3Config(
        dim=256,
        num_layers=6,
        num_dense_layers=1,
        vocab_size=2048,
        dense_hidden_dim=1024,
        attention=_published_attention(num_heads=16, q_lora_rank=0, mscale=0.707, max_seq_len=4096),
        moe=MoEConfig(
            routing=RoutingConfig(num_experts=8, top_k=3, score="softmax"), hidden_dim=256, num_shared_experts=2
        ),
    )


def _16b() -> DeepSeekV3Config:
    # DeepSeek-V2-Lite.
    return DeepSeekV3Config(
        dim=2048,
        num_layers=27,
        num_dense_layers=1,
        vocab_size=102400,
        dense_hidden_dim=10944,
        attention=_published_attention(num_heads=16, q_lora_rank=0, mscale=0.707, max_seq_len=16384),
        moe=MoEConfig(
            routing=RoutingConfig(num_experts=64, top_k=6, score="softmax"), hidden_dim=1408, num_shared_experts=2
        ),
    )


def _671b() -> DeepSeekV3Config:
    # DeepSeek-V3 as published.
    return DeepSeekV3Config(
        dim=7168,
        num_layers=61,
        num_dense_layers=3,
        vocab_size=129280,
        dense_hidden_dim=18432,
        attention=_published_attention(num_heads=128, q_lora_rank=1536, mscale=1.0, max_seq_len=16384),
        moe=MoEConfig(
            routing=RoutingConfig(
                num_experts=256, top_k=8, score="sigmoid", num_groups=8, top_groups=4, norm=True, scale=2.5
            ),
            hidden_dim=2048,
            num_shared_experts=1,
        ),
    )


def _published_attention(*, num_heads: int, q_lora_rank: int, mscale: float, max_seq_len: int) -> LatentAttentionConfig:
    """Return the attention of a published size, with the fields that are the same in all published sizes filled in.

    The rotary tables are shorter than the published 163,840 rows, which nothing here would use.
    """
    return LatentAttentionConfig(
        num_heads=num_heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeConfig(max_seq_len=max_seq_len, scaling=Yarn(factor=40.0, original_seq_len=4096, mscale=mscale)),
    )


FLAVORS: dict[str, DeepSeekV3Config] = {
    "tiny": _tiny(),
    "uneven": _uneven(),
    "many_experts": _many_experts(),
    "dense": replace(_tiny(), num_layers=1, num_dense_layers=1),
    "debugmodel": _debugmodel(),
    "16B": _16b(),
    "671B": _671b(),
}
