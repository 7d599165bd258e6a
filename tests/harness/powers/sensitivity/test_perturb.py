"""Values made wrong, a little and grossly."""

from __future__ import annotations

import random

import pytest
import torch

from bitproof.harness.powers.sensitivity.perturb import (
    as_integers,
    by_one_ulp,
    copied,
    grossly,
    is_safe,
    same,
    tensors_of,
)

CHANCE = random.Random(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_element_is_off_by_one_ulp(dtype):
    x = torch.tensor([0.0, -1.5, float("inf"), 2.0, 3.0], dtype=dtype)[::2]
    for turn in range(20):
        wrong = by_one_ulp(x, random.Random(turn))
        apart = (as_integers(wrong) - as_integers(x)).abs()
        assert apart.tolist() == [0, 0, 1], "the one element that is finite and not zero"
        assert wrong.stride() == x.stride()
    assert x[2] == 3.0


def test_the_largest_numbers_and_infinity_become_smaller():
    largest = torch.finfo(torch.float32).max
    for turn in range(4):
        assert by_one_ulp(torch.tensor([-largest]), random.Random(turn)).item() > -largest
        assert by_one_ulp(torch.tensor([float("-inf")]), random.Random(turn)).item() == -largest


def test_a_complex_number_is_off_in_one_of_its_parts():
    x = torch.tensor([1 + 2j])
    for turn in range(4):
        wrong = torch.view_as_real(by_one_ulp(x, random.Random(turn)))
        assert (as_integers(wrong) - as_integers(torch.view_as_real(x))).abs().sum() == 1


def test_a_tensor_of_zeros_gets_the_ulp_of_one():
    assert by_one_ulp(torch.zeros(1), CHANCE).item() == 2.0**-23
    assert by_one_ulp(torch.zeros(1, dtype=torch.bfloat16), CHANCE).item() == 2.0**-7


def test_integers_stay_within_what_they_span_where_they_can():
    x = torch.tensor([3, 5, 7])
    for turn in range(20):
        wrong = by_one_ulp(x, random.Random(turn))
        assert (wrong - x).abs().sum() == 1 and int(wrong.min()) >= 3 and int(wrong.max()) <= 7
    assert by_one_ulp(torch.tensor([4, 4]), random.Random(0)).sum() == 9
    assert by_one_ulp(torch.tensor([True]), CHANCE).tolist() == [False]
    assert by_one_ulp(0, CHANCE) == 1 and by_one_ulp(True, CHANCE) is None and by_one_ulp("text", CHANCE) is None


def test_an_expanded_element_changes_wherever_it_is_seen():
    wrong = by_one_ulp(torch.ones(1).expand(3), CHANCE)
    assert wrong.stride() == (0,) and len(set(wrong.tolist())) == 1 and wrong[0] != 1
    gross = grossly(torch.ones(1).expand(3), CHANCE)
    assert gross.stride() == (0,) and gross[0] != 1


def test_gross_errors_are_in_every_element_and_finite():
    for x in (torch.randn(64), torch.zeros(64), torch.randn(64).to(torch.bfloat16)):
        wrong = grossly(x, CHANCE)
        assert bool((wrong != x).all()) and bool(wrong.isfinite().all())
    masked = torch.tensor([float("-inf"), 1.0])
    assert grossly(masked, CHANCE)[0] == float("-inf")
    drawn = grossly(torch.arange(10), CHANCE)
    assert int(drawn.min()) >= 0 and int(drawn.max()) <= 9
    assert grossly(torch.zeros(2, dtype=torch.int64), CHANCE).tolist() == [1, 1]


def test_one_of_several_results_is_changed_and_the_others_are_handed_on():
    pair = (torch.zeros(0), torch.ones(2))
    wrong = by_one_ulp(pair, CHANCE)
    assert wrong[0] is pair[0] and not same(wrong[1], pair[1])
    assert len(tensors_of(pair)) == 1


def test_bits_are_compared_and_not_values():
    nan = torch.tensor([float("nan")])
    assert same(nan, nan.clone()) and not same(torch.zeros(1), -torch.zeros(1))
    assert same((1, nan), (1, nan)) and not same((1, nan), (1,)) and not same(1, 1.0)
    assert not same(torch.ones(1), torch.ones(1, dtype=torch.float64))


def test_a_copy_lies_as_the_original_does():
    x = torch.arange(12.0).view(3, 4).t()[1:]
    y = copied(x)
    assert same(x, y) and (x.stride(), x.storage_offset()) == (y.stride(), y.storage_offset())
    y[0, 0] = -1
    assert x[0, 0] == 1


def test_integers_may_be_indices_and_are_not_safe():
    assert is_safe(torch.ones(1)) and is_safe((torch.ones(1), torch.ones(1)))
    assert not is_safe(torch.ones(1, dtype=torch.int64)) and not is_safe(3)
