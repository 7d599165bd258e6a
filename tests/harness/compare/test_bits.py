from __future__ import annotations

import math

import pytest
import torch

from bitproof.harness.compare.bits import NUM_SAMPLES, bit_difference, bits_equal, max_ulp_distance
from bitproof.harness.errors import RecordingError

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbouring_floats_are_one_ulp_apart_everywhere(dtype):
    values = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.25], dtype=dtype)
    neighbours = torch.nextafter(values.double() if dtype == torch.float64 else values, values.new_tensor(math.inf))
    assert max_ulp_distance(values, neighbours) == 1
    assert max_ulp_distance(values, values) == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_two_signs_differ_by_one_ulp(dtype):
    plus, minus = torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)
    assert torch.equal(plus, minus), "values agree, bits do not"
    assert not bits_equal(plus, minus)
    difference = bit_difference(plus, minus)
    assert (difference.elements_differing, difference.max_ulp) == (1, 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_equals_itself_and_not_another_payload(dtype):
    nan = torch.tensor([math.nan], dtype=dtype)
    integer = INTEGER[dtype.itemsize]
    other = (nan.view(integer) + 1).view(dtype)
    assert bits_equal(nan, nan.clone())
    assert not bits_equal(nan, other)
    assert bit_difference(nan, other).max_ulp == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_distance_between_the_ends_of_the_order_does_not_overflow(dtype):
    integer = INTEGER[dtype.itemsize]
    highest = torch.tensor([torch.iinfo(integer).max], dtype=integer).view(dtype)
    lowest = torch.tensor([-1], dtype=integer).view(dtype)
    assert max_ulp_distance(lowest, highest) == 2 ** (8 * dtype.itemsize) - 1


def test_the_distance_agrees_with_an_exact_count_over_all_of_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    finite = sorted(float(number) for number in numbers if math.isfinite(number) and number > 0)
    position = {value: index for index, value in enumerate(finite)}
    generator = torch.Generator().manual_seed(0)
    for left, right in torch.randint(len(finite), (50, 2), generator=generator).tolist():
        pair = [torch.tensor([finite[i]], dtype=torch.bfloat16) for i in (left, right)]
        assert max_ulp_distance(*pair) == abs(position[finite[left]] - position[finite[right]])


def test_the_first_differing_element_is_shown_in_bits_and_place():
    reference = torch.ones(3, 4)
    candidate = reference.clone()
    candidate[1, 2] = 2.0
    candidate[2, 0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    difference = bit_difference(reference, candidate)
    assert (difference.elements, difference.elements_differing, difference.max_ulp) == (12, 2, 2**23)
    assert difference.first_index == (1, 2)
    assert (difference.reference_bits, difference.candidate_bits) == ("0x3f800000", "0x40000000")


def test_a_permutation_and_an_even_number_of_sign_flips_show():
    reference = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert bit_difference(reference, reference.flip(0)).elements_differing == 4
    assert bit_difference(reference, reference * torch.tensor([-1.0, -1.0, 1.0, 1.0])).elements_differing == 2


def test_elements_are_counted_by_ulps_and_the_first_that_differ_are_shown():
    reference = torch.ones(3, 4)
    candidate = reference.clone()
    candidate.view(torch.int32)[1, 2:] += torch.tensor([1, 4], dtype=torch.int32)
    candidate[2, 0] = math.nan
    difference = bit_difference(reference, candidate)
    assert difference.histogram == {"0": 9, "1": 1, "3-4": 1, "unlike": 1}
    assert difference.samples == (
        ((1, 2), "0x3f800000", "0x3f800001"),
        ((1, 3), "0x3f800000", "0x3f800004"),
        ((2, 0), "0x3f800000", "0x7fc00000"),
    )
    assert bit_difference(reference, reference.clone()).histogram == {"0": 12}
    assert bit_difference(reference, reference.clone()).samples == ()


def test_few_of_many_elements_that_differ_are_shown():
    difference = bit_difference(torch.zeros(100), torch.ones(100))
    assert [index for index, _, _ in difference.samples] == [(i,) for i in range(NUM_SAMPLES)]


def test_layout_does_not_count():
    reference = torch.arange(12.0).reshape(3, 4)
    assert bits_equal(reference, reference.t().contiguous().t())
    assert bit_difference(reference, reference.t().contiguous().t()).is_equal


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_compared_in_bits_without_ulps(dtype):
    reference = torch.tensor([0, 1, 1]).to(dtype)
    candidate = torch.tensor([0, 0, 1]).to(dtype)
    difference = bit_difference(reference, candidate)
    assert (difference.elements_differing, difference.first_index, difference.max_ulp) == (1, (1,), None)
    assert difference.histogram is None
    assert [index for index, *_ in difference.samples] == [(1,)]


def test_scalars_and_empty_tensors_are_compared_too():
    difference = bit_difference(torch.tensor(1.0), torch.tensor(-1.0))
    assert (difference.elements, difference.first_index) == (1, ())
    empty = bit_difference(torch.empty(0, 3), torch.empty(0, 3))
    assert (empty.elements, empty.elements_differing, empty.max_ulp) == (0, 0, 0)


def test_a_conjugate_view_is_compared_as_it_reads():
    value = torch.tensor([1 + 2j])
    assert bits_equal(value.conj(), torch.tensor([1 - 2j]))
    assert not bits_equal(value.conj(), value)


def test_different_dtypes_or_shapes_are_refused_before_values():
    assert not bits_equal(torch.zeros(2), torch.zeros(2, 1))
    assert not bits_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RecordingError) as error:
        bit_difference(torch.zeros(2), torch.zeros(2, 1, dtype=torch.bfloat16))
    assert str(error.value) == (
        "RecordingError: tensors of different dtype or shape have no bits to compare\n"
        "  expected: float32[2]\n"
        "  found: bfloat16[2, 1]"
    )


def test_one_element_that_kept_its_stride_is_compared_like_any_other():
    strided = torch.arange(6.0).reshape(3, 2)[1:2, 1]
    assert strided.is_contiguous() and strided.stride() == (2,)
    assert bits_equal(strided, torch.tensor([3.0]))
    assert not bits_equal(strided, torch.tensor([2.0]))
