"""The residual block, and the decoder from token ids to logits. All model families share them.

B batch, S sequence, D model dim, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from bitproof.reference.layers.feed_forward import FeedForward
from bitproof.reference.layers.moe import MoE
from bitproof.reference.layers.rms_norm import RMSNorm
from bitproof.reference.layers.vocabulary import Output


class Block(nn.Module):
    """Attention, then a dense layer or a mixture of experts. Each layer f maps x to x + f(norm(x))."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: FeedForward | MoE, *, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim, eps=norm_eps)
        self.is_dense = isinstance(feed_forward, FeedForward)
        if self.is_dense:
            self.feed_forward = feed_forward
        else:
            self.moe = feed_forward

    def forward(self, x_BSD: Tensor, positions_BS: Tensor, attention_masks: object | None = None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), positions_BS, attention_masks)
        h_BSD = self.ffn_norm(x_BSD)
        x_BSD = x_BSD + (self.feed_forward(h_BSD) if self.is_dense else self.moe(h_BSD))
        return x_BSD


class Decoder(nn.Module):
    """Maps token and position ids to logits in the parameters' dtype; with labels, to the mean loss."""

    def __init__(self, vocab_size: int, dim: int, blocks: Iterable[Block], *, norm_eps: float) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(blocks)
        self.num_layers = len(self.layers)
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.output = Output(dim, vocab_size, bias=False)

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        attention_masks: object | None = None,
        labels_BS: Tensor | None = None,
        loss_pieces: int = 1,
    ) -> Tensor:
        """Return logits_BSV. With labels, return the mean cross entropy instead, as a float32 scalar.

        The loss is computed in `loss_pieces` equal pieces of the tokens.
        """
        x_BSD = self.tok_embeddings(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, positions_BS, attention_masks)
        if labels_BS is not None:
            loss: Tensor = self.output(self.norm(x_BSD), labels_BS, loss_pieces)
            return loss
        logits_BSV: Tensor = self.output(self.norm(x_BSD))
        return logits_BSV
