import pytest
import torch
from torch import nn

from bitproof.harness.case import AdamW, Parallelism
from bitproof.reference.optimizer import ShardedAdamW, balance_experts, layers_with_experts
from tests.ranks import on_ranks


class Layer(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(len(counts)))
        self.register_buffer("tokens_per_expert", torch.tensor(counts))


@pytest.mark.ranks
def test_biases_move_toward_balance_by_counts_summed_over_ranks():
    def body(mesh):
        # On rank 0 alone expert 0 is the busiest; over both ranks it is expert 1.
        model = nn.ModuleList([Layer([5.0, 4.0, 3.0, 0.0] if mesh.rank == 0 else [0.0, 6.0, 3.0, 3.0])])
        balance_experts(layers_with_experts(model), 0.25)
        return [model[0].expert_bias.tolist(), model[0].tokens_per_expert.tolist()]

    expected = [[0.25, -0.25, 0.0, 0.25], [0.0] * 4]
    assert on_ranks(Parallelism(world_size=2, ep=1), body) == [expected] * 2


def test_a_model_without_experts_has_nothing_to_balance():
    assert layers_with_experts(nn.Linear(2, 2)) == []
    balance_experts([], 0.1)


def test_one_step_is_adamw_with_decoupled_decay():
    weight = nn.Parameter(torch.tensor([2.0]))
    settings = AdamW(lr=0.5, betas=(0.9, 0.95), eps=0.0, weight_decay=0.1)
    optimizer = ShardedAdamW({"w": weight}, settings)
    optimizer.step({"w": torch.tensor([3.0])})
    torch.testing.assert_close(weight.detach(), torch.tensor([2.0 * (1 - 0.5 * 0.1) - 0.5]))
    state = dict(optimizer.state())
    assert set(state) == {"w.step", "w.exp_avg", "w.exp_avg_sq"}
    assert weight.grad is None
