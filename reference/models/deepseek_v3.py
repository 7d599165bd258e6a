"""DeepSeek-V3 (arXiv:2412.19437): latent attention, dense first layers, then mixtures of experts.

Multi-token prediction is left out: it is another model's worth of code and no other kind of arithmetic.

B batch, S sequence, D model dim, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from harness.errors import CaseError
from reference.layers.attention import LatentAttention, LatentAttentionConfig
from reference.layers.feed_forward import FeedForward
from reference.layers.moe import MoE, MoEConfig
from reference.layers.rms_norm import RMSNorm
from reference.layers.rope import RopeConfig, Yarn
from reference.layers.router import RoutingConfig


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config:
    """One size of the model. The first `num_dense_layers` of `num_layers` layers have no experts."""

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
                "a model needs layers, of which the first are dense",
                expected="num_layers >= 1 and 0 <= num_dense_layers <= num_layers",
                found=f"num_layers={self.num_layers}, num_dense_layers={self.num_dense_layers}",
            )


class Block(nn.Module):
    """Attention, then a dense layer or a mixture of experts; each normalizes its input and is added to it."""

    def __init__(self, config: DeepSeekV3Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = LatentAttention(config.dim, config.attention)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.is_dense = layer < config.num_dense_layers
        if self.is_dense:
            self.feed_forward = FeedForward(config.dim, config.dense_hidden_dim)
        else:
            self.moe = MoE(config.dim, config.moe)

    def forward(self, x_BSD: Tensor, positions_BS: Tensor, attention_masks: object | None = None) -> Tensor:
        """Returns (B, S, D) in x's dtype."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), positions_BS, attention_masks)
        h_BSD = self.ffn_norm(x_BSD)
        x_BSD = x_BSD + (self.feed_forward(h_BSD) if self.is_dense else self.moe(h_BSD))
        return x_BSD


class DeepSeekV3(nn.Module):
    """Token and position ids in, logits out, in the parameters' dtype."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, attention_masks: object | None = None) -> Tensor:
        """Returns logits_BSV."""
        x_BSD = self.tok_embeddings(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, positions_BS, attention_masks)
        logits_BSV: Tensor = self.output(self.norm(x_BSD))
        return logits_BSV


def _tiny() -> DeepSeekV3Config:
    """The 671B model's features in miniature, but for the query latent: collectives make up most of a CPU step,
    and it would add six parameters to gather.

    Dims that elementwise kernels run over are multiples of 64, so no row count leaves a vector kernel a tail;
    query/key and value head dims agree, by which attention on a CPU is one flash kernel.
    """
    return DeepSeekV3Config(
        dim=64,
        num_layers=3,
        num_dense_layers=1,
        vocab_size=264,
        dense_hidden_dim=128,
        attention=LatentAttentionConfig(
            num_heads=4,
            q_lora_rank=0,
            kv_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            rope=RopeConfig(max_seq_len=512, yarn=Yarn(factor=4.0, original_seq_len=128)),
        ),
        moe=MoEConfig(
            routing=RoutingConfig(
                num_experts=8, top_k=3, score="sigmoid", num_groups=4, top_groups=2, norm=True, scale=2.5
            ),
            hidden_dim=64,
            num_shared_experts=1,
        ),
    )


def _debugmodel() -> DeepSeekV3Config:
    """Wide latents and heads of published size on a narrow model; softmax scores, no groups, no query latent."""
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
    """DeepSeek-V2-Lite's published dimensions."""
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
    """DeepSeek-V3's published dimensions."""
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
    """What all published sizes share. The tables' length is ours: the published 163,840 rows would go unused."""
    return LatentAttentionConfig(
        num_heads=num_heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeConfig(max_seq_len=max_seq_len, yarn=Yarn(factor=40.0, original_seq_len=4096, mscale=mscale)),
    )


FLAVORS: dict[str, DeepSeekV3Config] = {
    "tiny": _tiny(),
    "dense": replace(_tiny(), num_layers=1, num_dense_layers=1),
    "debugmodel": _debugmodel(),
    "16B": _16b(),
    "671B": _671b(),
}
