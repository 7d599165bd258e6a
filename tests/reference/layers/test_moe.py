"""A mixture of experts against the plain sum over each token's experts, its order and its counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bitproof.reference.init import initialize
from bitproof.reference.layers.moe import MoE, MoEConfig
from bitproof.reference.layers.router import Routing, RoutingConfig

ROUTING = RoutingConfig(num_experts=8, top_k=3, score="sigmoid", num_groups=4, top_groups=2, norm=True, scale=2.5)
CONFIG = MoEConfig(routing=ROUTING, hidden_dim=32, num_shared_experts=2)


@pytest.fixture
def moe() -> MoE:
    made = MoE(16, CONFIG)
    initialize(made, seed=0)
    return made


def random_rows() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def test_a_token_gets_the_weighted_sum_of_its_experts_and_the_shared_ones(moe: MoE) -> None:
    x_BSD = random_rows()
    x_TD = x_BSD.flatten(0, 1)
    experts_TK, weights_TK, _ = moe.router(x_TD, moe.expert_bias)
    assert moe.shared_experts is not None
    expected_TD = moe.shared_experts(x_TD)
    for token in range(10):
        for expert, weight in zip(experts_TK[token], weights_TK[token], strict=True):
            w1, w2, w3 = moe.experts.w1[expert], moe.experts.w2[expert], moe.experts.w3[expert]
            hidden = nn.functional.silu(w1 @ x_TD[token]) * (w3 @ x_TD[token])
            expected_TD[token] = expected_TD[token] + weight * (w2 @ hidden)
    torch.testing.assert_close(moe(x_BSD), expected_TD.view(2, 5, 16))


def test_expert_rows_are_summed_in_ascending_slot_order() -> None:
    """Experts return 1, 1e8 and -1e8, by slot: in float32 only one order makes their sum 0."""
    ungrouped = replace(ROUTING, num_groups=1, top_groups=1, norm=False, scale=1.0)
    moe = MoE(8, MoEConfig(routing=ungrouped, hidden_dim=8, num_shared_experts=0))
    routing = (torch.tensor([[2, 5, 0]]), torch.tensor([[1.0, 1e8, -1e8]]), torch.tensor([1, 0, 1, 0, 0, 1, 0, 0]))

    class Ones(nn.Module):
        def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
            return torch.ones_like(rows_RD)

    class Fixed(nn.Module):
        def forward(self, x_TD: Tensor, expert_bias_E: Tensor) -> object:
            return Routing(*routing)

    moe.experts, moe.router = Ones(), Fixed()  # type: ignore[assignment]
    assert torch.equal(moe(torch.ones(1, 1, 8)), torch.zeros(1, 1, 8))


def test_tokens_per_expert_accumulates_in_place_over_forwards(moe: MoE) -> None:
    counter = moe.tokens_per_expert
    counts_E = moe.router(random_rows().flatten(0, 1), moe.expert_bias).counts_E
    moe(random_rows())
    assert torch.equal(counter, counts_E.float())
    moe(random_rows())
    assert torch.equal(counter, 2 * counts_E.float())
    assert counter is moe.tokens_per_expert
    assert counter.sum() == 2 * 10 * 3


def test_the_expert_bias_changes_who_is_counted(moe: MoE) -> None:
    moe.expert_bias[5] = 10.0
    moe(random_rows())
    assert moe.tokens_per_expert[5] == 10


def test_no_shared_experts_is_a_model_without_their_parameters() -> None:
    lone = MoE(16, replace(CONFIG, num_shared_experts=0))
    assert not [name for name, _ in lone.named_parameters() if "shared" in name]
    assert lone(random_rows()).shape == (2, 5, 16)


def test_gradients_reach_the_input_the_router_and_every_used_expert(moe: MoE) -> None:
    x_BSD = random_rows().requires_grad_()
    moe(x_BSD).square().sum().backward()
    assert x_BSD.grad is not None
    assert x_BSD.grad.ne(0).any(-1).all()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.ne(0).any()
    assert moe.experts.w1.grad is not None
    used_E = moe.tokens_per_expert > 0
    assert torch.equal(moe.experts.w1.grad.ne(0).flatten(1).any(1), used_E)
