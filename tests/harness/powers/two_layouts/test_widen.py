"""A run in float64: every call computes in it, draws are the plain run's, and what was rounded before is noted."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from bitproof.harness.powers.two_layouts.widen import Widened, computed_in_float64


def widely(call, *args):
    """What a call returns in float64, and the first call that read fewer bits."""
    found = Widened()
    with computed_in_float64(found):
        return call(*args), found.narrow


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: torch.full((2,), 0.1, dtype=torch.bfloat16),
        lambda: torch.arange(0, 1, 0.1, dtype=torch.float32),
        lambda: torch.ones(3, dtype=torch.int64).float() / 3,
        lambda: torch.tensor([0.1]),
        lambda: nn.Linear(4, 4, dtype=torch.bfloat16).to(torch.float16).weight,
        lambda: torch.softmax(torch.randn(4), -1, dtype=torch.float32),
        lambda: torch.randn(4, dtype=torch.float16).to(torch.bfloat16),
        lambda: torch.empty(4).normal_(),
        lambda: torch.ones(4).sum(dtype=torch.float32),
        lambda: (torch.ones(4, dtype=torch.int64) @ torch.ones(4, dtype=torch.int64)).to(torch.float32),
    ],
)
def test_whatever_dtype_a_call_asks_for_it_computes_in_float64(make):
    found, narrow = widely(make)
    assert (found.dtype, narrow) == (torch.float64, None)


def test_complex_numbers_have_as_many_bits_and_integers_stay():
    assert widely(lambda: torch.polar(torch.ones(2), torch.ones(2)).to(torch.complex64))[0].dtype == torch.complex128
    assert widely(lambda: torch.randint(9, (3,)))[0].dtype == torch.int64
    assert widely(lambda: torch.randperm(9))[0].dtype == torch.int64
    assert widely(lambda: torch.zeros(2, dtype=torch.int32).view(torch.uint8))[0].shape == (8,)


def test_a_written_number_is_not_rounded():
    assert widely(lambda: torch.full((), 0.1, dtype=torch.float32))[0].item() == 0.1
    assert widely(lambda: torch.tensor(0.1))[0].item() == 0.1


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(100),
        lambda: torch.rand(100),
        lambda: torch.rand_like(torch.ones(7)),
        lambda: torch.empty(100).uniform_(-1, 1),
        lambda: nn.Linear(20, 30).weight.detach(),
        lambda: functional.dropout(torch.ones(100), 0.5),
        lambda: torch.randint(9, (30,)),
        lambda: torch.randperm(30),
        lambda: torch.bernoulli(torch.full((50,), 0.5)),
    ],
)
def test_random_numbers_are_those_of_the_plain_run_and_so_is_the_generator_afterwards(draw):
    torch.manual_seed(5)
    plain, after = draw(), torch.get_rng_state()
    torch.manual_seed(5)
    wide, _ = widely(draw)
    assert torch.equal(wide, plain.to(wide.dtype)) and torch.equal(torch.get_rng_state(), after)


def steps(eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 9)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        tokens = torch.randint(9, (4, 7))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(tokens)
        functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_mixed_precision_is_taken_in_float64_alone(dtype):
    """Weights that were bfloat16 when they were drawn have the plain run's values; the rest is as exact as float64."""
    plain = steps(dtype=dtype)
    wide, narrow = widely(steps, 1e-5, dtype)
    assert (wide.dtype, narrow) == (torch.float64, None)
    torch.testing.assert_close(wide.float(), plain.float(), rtol=0.1, atol=0.1)


def test_a_small_defect_stays_as_it_is_where_rounding_all_but_vanishes():
    with torch.autocast("cpu", enabled=False):
        right, wrong = widely(steps)[0], widely(steps, 9.99e-6)[0]
    again = widely(steps)[0]
    assert torch.equal(right, again)
    assert (right - wrong).abs().max() > 1e-10


def test_nothing_changes_without_it_and_all_is_as_before_afterwards():
    with computed_in_float64(None):
        assert torch.zeros(1).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), computed_in_float64(Widened()):
        torch.set_default_dtype(torch.bfloat16)
        assert torch.zeros(1).dtype == torch.float64, "user code has set another default"
        raise ZeroDivisionError
    assert torch.zeros(1).dtype == torch.float32


def test_numbers_from_outside_are_widened_and_the_first_call_that_reads_rounded_ones_is_noted():
    table = torch.from_numpy(numpy.linspace(0, 1, 7, dtype=numpy.float32))
    found, narrow = widely(lambda: torch.ones(7) * table)
    assert found.dtype == torch.float64 and torch.equal(found, table.double())
    assert narrow is not None and narrow.startswith("aten.mul.Tensor (") and "test_widen.py:" in narrow
    _, narrow = widely(lambda: torch.ones(3, 3) @ table[:6].view(3, 2))
    assert narrow is not None and narrow.startswith("aten.mm.default")


@pytest.mark.parametrize("values", [[0.0, 1.0, -1.0], [0.5, 0.25, 3.0], [float("-inf"), 0.0], [float("nan"), 2.0], []])
def test_numbers_of_few_digits_were_rounded_on_neither_side(values):
    mask = torch.tensor(values, dtype=torch.float32)
    found, narrow = widely(lambda: torch.ones(len(values)) + mask)
    assert (found.dtype, narrow) == (torch.float64, None)


def test_float16_numbers_from_outside_may_always_be_rounded():
    _, narrow = widely(lambda: torch.ones(1) * TENTH)
    assert narrow is not None


TENTH = torch.tensor([0.1], dtype=torch.bfloat16)


def test_a_module_that_was_built_before_is_trained_in_its_own_dtype_and_noted():
    model = nn.Linear(4, 2)

    def train():
        own = copy.deepcopy(model)
        own(torch.ones(3, 4)).sum().backward()
        return own.weight.grad

    _, narrow = widely(train)
    assert narrow is not None
