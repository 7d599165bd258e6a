"""Mixture of experts: route tokens, run their experts, sum the results, add the shared experts.

B batch, S sequence, T tokens (B * S), D model dim, E experts, K experts of a token (top k), R routed rows (T * K)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate

from bitproof.reference.layers.experts import COMBINE, COMPUTE, DISPATCH, Exchange, Experts, LocalExchange
from bitproof.reference.layers.feed_forward import FeedForward
from bitproof.reference.layers.ordered_sum import ordered_sum
from bitproof.reference.layers.router import Router, Routing, RoutingConfig
from bitproof.reference.layers.wide import wides

__all__ = ["Exchange", "Experts", "LocalExchange", "MoE", "MoEConfig"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The sizes of a mixture of experts.

    - `hidden_dim`: the hidden dim of an expert.
    - `capacity`: an expert accepts at most `capacity` times its even share of a rank's rows, rounded up; None for no
      limit.
    """

    routing: RoutingConfig
    hidden_dim: int
    num_shared_experts: int
    capacity: float | None = None


class MoE(nn.Module):
    """Routed experts plus shared experts. A bias per expert balances their load, without a loss for it
    (arXiv:2408.15664).

    There are two float32 buffers of shape (E,):

    - `expert_bias`: added to the scores that choose experts.
    - `tokens_per_expert`: the number of rows of each expert, exact up to 2^24. Every forward adds to it in place. The
      optimizer step reads it and sets it to zero.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        num_experts = config.routing.num_experts
        self.router = Router(dim, config.routing)
        self.experts = Experts(num_experts, dim, config.hidden_dim)
        self.shared_experts = (
            FeedForward(dim, config.hidden_dim * config.num_shared_experts) if config.num_shared_experts else None
        )
        self.wide = wides("rows", "weighted", "y")
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.float32))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the sum of the routed and the shared experts, in x's shape and dtype: (B, S, D), or (T, D) for folded
        tokens.
        """
        with annotate(COMPUTE):
            x_TD = x_BSD.flatten(0, -2)
            routing = self.router(x_TD, self.expert_bias)
            with torch.no_grad():
                # In place: a tracer records add_ but silently drops `self.tokens_per_expert = ... + ...`.
                self.tokens_per_expert.add_(routing.counts_E)
            y_TD = self._routed(x_TD, routing)
            if self.shared_experts is not None:
                y_TD = y_TD + self.shared_experts(x_TD)
            return y_TD.view(x_BSD.shape)

    def _routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return, for each token, the weighted sum of its experts' results, in x's dtype.

        The results are added in float32, in the order of `routing.experts_TK`, best expert first. The sum is rounded.
        """
        top_k = self.config.routing.top_k
        with annotate(DISPATCH):
            pairs_RD = x_TD.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
            # A stable permutation sorts rows by expert, then by token. So backward scatters each row's gradient to a
            # place of its own, and then sums each token's K slots.
            by_expert_R = routing.experts_TK.flatten().argsort(stable=True)
            rows_RD = pairs_RD[by_expert_R]
        rows_RD = self.experts(rows_RD, routing.counts_E)
        with annotate(COMBINE):
            # The inverse permutation: back to the order of (token, slot) pairs.
            by_pair_R = by_expert_R.argsort()
            y_TKD = rows_RD[by_pair_R].view(x_TD.shape[0], top_k, x_TD.shape[1])
            weighted_TKD = self.wide["weighted"](self.wide["rows"](y_TKD.float()) * routing.weights_TK.unsqueeze(-1))
            wide_TD: Tensor = self.wide["y"](ordered_sum(weighted_TKD, 1))
            return wide_TD.to(x_TD.dtype)
