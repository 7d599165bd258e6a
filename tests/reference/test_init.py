"""Initial values depend on a name, a shape and a seed, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Model
from bitproof.harness.errors import CaseError
from bitproof.reference.init import initial_values, initialize, spread_biases
from bitproof.reference.models import build_model


def test_values_do_not_depend_on_construction_order_or_on_earlier_draws() -> None:
    torch.manual_seed(1)
    first = build_model(Model())
    initialize(first, seed=3)
    torch.manual_seed(2)
    torch.rand(5)
    second = build_model(Model())
    for name, parameter in reversed(list(second.named_parameters())):
        parameter.data.copy_(initial_values(name, parameter.shape, 3))
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_part_of_a_model_gets_the_whole_models_values() -> None:
    whole, other = build_model(Model()), build_model(Model())
    initialize(whole, seed=0)
    part = other.get_submodule("layers.1")
    initialize(part, seed=0, prefix="layers.1.")
    for name, value in part.named_parameters():
        assert torch.equal(value, whole.get_parameter(f"layers.1.{name}"))


RECORDED = ["-0x1.9397280000000p-2", "-0x1.0df5960000000p-2", "-0x1.1d817c0000000p-1"]


def test_values_are_the_same_on_every_machine() -> None:
    """Recorded from one machine: integer draws and exact scaling leave a machine no choice."""
    values = initial_values("layers.0.attention.wq.weight", (2, 4), 0).flatten().tolist()
    assert [value.hex() for value in values[:3]] == RECORDED


@pytest.mark.parametrize(
    ("other_name", "other_seed"),
    [("layers.0.attention.wo.weight", 0), ("layers.1.attention.wq.weight", 0), ("layers.0.attention.wq.weight", 1)],
)
def test_another_name_or_another_seed_gives_other_values(other_name: str, other_seed: int) -> None:
    values = initial_values("layers.0.attention.wq.weight", (8, 8), 0)
    assert not torch.equal(values, initial_values(other_name, (8, 8), other_seed))


@pytest.mark.parametrize(
    ("name", "shape", "std"),
    [
        ("tok_embeddings.weight", (264, 64), 1.0),
        ("layers.0.attention.wq_a.weight", (128, 64), 64**-0.5),
        ("layers.1.moe.experts.w2", (8, 64, 128), 128**-0.5),
        ("layers.1.moe.router.weight", (64, 256), 256**-0.5),
    ],
)
def test_the_spread_follows_the_rule(name: str, shape: tuple[int, ...], std: float) -> None:
    values = initial_values(name, shape, 0)
    assert values.dtype == torch.float32
    assert values.std().item() == pytest.approx(std, rel=0.03)
    assert abs(values.mean().item()) < 0.05 * std


def test_norms_start_at_one_and_expert_buffers_at_zero() -> None:
    assert torch.equal(initial_values("layers.0.attention.q_norm.weight", (8,), 0), torch.ones(8))
    assert torch.equal(initial_values("layers.1.moe.expert_bias", (8,), 0), torch.zeros(8))
    assert torch.equal(initial_values("layers.1.moe.tokens_per_expert", (8,), 0), torch.zeros(8))


def test_a_vector_that_is_no_norm_is_refused() -> None:
    with pytest.raises(CaseError) as refusal:
        initial_values("layers.0.attention.wq.bias", (8,), 0)
    assert str(refusal.value) == (
        "CaseError: no rule gives layers.0.attention.wq.bias its initial values\n"
        "  expected: a norm's weight, or a tensor of two or more dims\n"
        "  found: shape (8,)"
    )


def test_a_model_from_the_meta_device_becomes_the_one_built_in_place() -> None:
    with torch.device("meta"):
        late = build_model(Model())
    late = late.to_empty(device="cpu")
    initialize(late, seed=0)
    built = build_model(Model())
    initialize(built, seed=0)
    ours = {**dict(late.named_parameters()), **dict(late.named_buffers())}
    theirs = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_spread_values_are_the_plain_ones_with_rows_of_seven_sizes():
    plain = initial_values("layers.0.attention.wq.weight", (14, 4), 0)
    spread = initial_values("layers.0.attention.wq.weight", (14, 4), 0, spread=True)
    ratios = (spread / plain)[:, 0].tolist()
    assert sorted(set(ratios)) == [2.0**k for k in range(-3, 4)] and ratios[:7] == ratios[7:]
    assert torch.equal(spread, plain * torch.tensor(ratios).unsqueeze(-1))


def test_spread_weights_of_norms_and_biases_of_experts_are_no_round_numbers():
    weight = initial_values("norm.weight", (64,), 0, spread=True)
    assert 0.5 <= weight.min() < 0.6 and 1.4 < weight.max() <= 1.5
    bias = initial_values("layers.0.moe.expert_bias", (8,), 0, spread=True)
    assert 0 < bias[[0, 2, 3, 4, 5, 6]].abs().max() <= 0.05 and len(bias.unique()) == 7


def test_roots_of_spread_embeddings_mean_squares_lie_near_the_middle_between_two_numbers():
    spread = initial_values("tok_embeddings.weight", (40, 64), 0, spread=True)
    means = spread.square().mean(-1) + 1e-6
    assert torch.equal(means, (spread.double().square().mean(-1) + torch.tensor(1e-6).double()).float()), "exact sums"

    def off_the_middle(values):
        roots = values.double().sqrt()
        places = roots / torch.exp2(roots.log2().floor()) * 2.0**23
        return (places - places.floor() - 0.5).abs()

    assert off_the_middle(means).max() < 0.01 < off_the_middle(means * 1.37).median()
    assert spread.isfinite().all() and 0.1 < spread.abs().max() < 20


def test_of_spread_experts_one_is_never_chosen_one_seldom_and_two_are_ties_and_few_experts_are_left_alone():
    bias = initial_values("layers.0.moe.expert_bias", (12,), 0, spread=True)
    assert bias[1] < -1 and -1 < bias[-1] < -0.1 and bias[3] == bias[4]
    router = initial_values("layers.0.moe.router.weight", (12, 4), 0, spread=True)
    assert torch.equal(router[3], router[4]) and not torch.equal(router[2], router[3])
    few = initial_values("layers.0.moe.expert_bias", (4,), 0, spread=True)
    assert few.abs().max() <= 0.05 and len(few.unique()) == 4


def test_spread_biases_are_written_where_they_lie():
    model = build_model(Model(layers=1, dense_layers=0))
    spread_biases(model, seed=0)
    [bias] = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    assert torch.equal(bias, initial_values("layers.0.moe.expert_bias", (8,), 0, spread=True))
