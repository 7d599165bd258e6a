"""The router: chooses the experts of each token, and their weights.

Sources: DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (sigmoid scores, balancing by bias, node-limited routing);
DeepSeek-V2, arXiv:2405.04434, section 2.2 (softmax scores).

T tokens, D model dim, E experts, K experts of a token (top k), G groups of experts, M experts of a group
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.ordered_sum import ordered_sum
from bitproof.reference.layers.wide import wides


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How experts are chosen and weighted.

    - `num_groups`, `top_groups`: the experts form `num_groups` groups of adjacent experts. A token may choose only from
      its best `top_groups` groups.
    - `norm`: True if a token's weights are divided by their sum.
    - `scale`: a factor on the weights, applied last.
    """

    num_experts: int
    top_k: int
    score: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    top_groups: int = 1
    norm: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in ("sigmoid", "softmax"):
            raise CaseError("unknown router score", expected="'sigmoid' or 'softmax'", found=repr(self.score))
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise CaseError(
                "expert groups must be of equal size",
                expected="num_groups >= 1 that divides num_experts",
                found=f"num_experts={self.num_experts}, num_groups={self.num_groups}",
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise CaseError(
                "a token must keep at least one of the expert groups",
                expected="1 <= top_groups <= num_groups",
                found=f"top_groups={self.top_groups}, num_groups={self.num_groups}",
            )
        if not 1 <= self.top_k <= self.experts_per_group * self.top_groups:
            raise CaseError(
                "the eligible groups must hold enough experts",
                expected="1 <= top_k <= top_groups * num_experts / num_groups",
                found=f"top_k={self.top_k}, {self.top_groups} groups of {self.experts_per_group}",
            )

    @property
    def experts_per_group(self) -> int:
        return self.num_experts // self.num_groups


class Routing(NamedTuple):
    """The choice of experts for each token.

    - `experts_TK`: each token's experts, best first.
    - `weights_TK`: their weights, in float32.
    - `counts_E`: the number of rows of each expert, int64.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor


class Router(nn.Module):
    """Chooses each token's experts. Scores are computed in float32 for any dtype of x and of the parameter."""

    def __init__(self, dim: int, config: RoutingConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)
        self.wide = wides("x", "weight", "logits", "scores", "choice", "group_choice", "eligible", "picked", "sum")

    def forward(self, x_TD: Tensor, expert_bias_E: Tensor) -> Routing:
        """Choose each token's experts and weights. The bias affects which experts are chosen, but not their weights."""
        scores_TE = self._scores(x_TD)
        experts_TK = select_experts(scores_TE.detach(), expert_bias_E, self.config, self._seen)
        weights_TK: Tensor = self.wide["picked"](scores_TE.gather(1, experts_TK))
        if self.config.norm:
            # 1e-20 as published: sigmoid scores may all underflow.
            weights_TK = weights_TK / (self.wide["sum"](ordered_sum(weights_TK, 1)).unsqueeze(1) + 1e-20)
        return Routing(experts_TK, weights_TK * self.config.scale, count_rows(experts_TK, self.config.num_experts))

    def _scores(self, x_TD: Tensor) -> Tensor:
        wide_TD, weight_ED = self.wide["x"](x_TD.float()), self.wide["weight"](self.weight.float())
        logits_TE: Tensor = self.wide["logits"](wide_TD @ weight_ED.t())
        return self._seen(
            "scores", logits_TE.sigmoid() if self.config.score == "sigmoid" else logits_TE.softmax(dim=-1)
        )

    def _seen(self, name: str, x: Tensor) -> Tensor:
        seen: Tensor = self.wide[name](x)
        return seen


@torch.no_grad()
def select_experts(
    scores_TE: Tensor,
    expert_bias_E: Tensor,
    config: RoutingConfig,
    seen: Callable[[str, Tensor], Tensor] = lambda name, x: x,
) -> Tensor:
    """Return experts_TK, each token's top k experts by score plus bias, within its top groups, best first.

    - The score of a group is that of its best expert (softmax), or the sum of those of its two best (sigmoid).
    - `seen`: gets (name, value) for each value that affects the choice, and returns the value.
    """
    choice_TE = seen("choice", scores_TE + expert_bias_E)
    if config.top_groups < config.num_groups:
        choice_TGM = choice_TE.view(choice_TE.shape[0], config.num_groups, config.experts_per_group)
        num_counted = min(2 if config.score == "sigmoid" else 1, config.experts_per_group)
        group_score_TG = seen("group_choice", ordered_sum(choice_TGM.topk(num_counted, dim=-1).values, -1))
        top_groups = group_score_TG.topk(config.top_groups, dim=-1).indices
        eligible_TG = torch.zeros_like(group_score_TG, dtype=torch.bool).scatter(1, top_groups, True)
        # Filled with -inf, not 0: a bias can make an eligible expert's value negative.
        choice_TE = seen("eligible", choice_TGM.masked_fill(~eligible_TG.unsqueeze(-1), float("-inf")).flatten(1))
    return choice_TE.topk(config.top_k, dim=-1).indices


@torch.no_grad()
def count_rows(experts_TK: Tensor, num_experts: int) -> Tensor:
    # Integers sum exactly in any order. `bincount` would need a host sync, and its size depends on the data. A
    # token's experts are distinct, so `scatter` writes no element twice.
    chosen_TE = experts_TK.new_zeros(experts_TK.shape[0], num_experts).scatter(1, experts_TK, 1)
    return chosen_TE.sum(0)
