"""What `assert_bitwise_equal` accepts, what it refuses, and every word that it says."""

from __future__ import annotations

import math
import re
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from bitproof.bitwise import assert_bitwise_equal
from bitproof.harness.capture.dtypes import DTYPES
from bitproof.harness.case import Parallelism
from tests.ranks import on_ranks

Point = namedtuple("Point", ["x", "y"])


@dataclass
class State:
    step: int
    moment: torch.Tensor


def message(actual, expected, **options) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(actual, expected, **options)
    return str(caught.value)


def nan_of_payload(payload: int) -> torch.Tensor:
    return torch.tensor([0x7FC00000 + payload], dtype=torch.int32).view(torch.float32)


def raw(dtype: torch.dtype) -> torch.Tensor:
    """Four elements of any dtype, by their bytes: no dtype has them all as numbers."""
    return torch.arange(1, 4 * dtype.itemsize + 1, dtype=torch.uint8).view(dtype)


def test_equal_bits_pass_wherever_they_lie():
    x = torch.randn(4, 6)
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(x.t().contiguous().t(), x)
    assert_bitwise_equal(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_bitwise_equal(x.requires_grad_(), torch.nn.Parameter(x.detach().clone()))


def test_one_flipped_bit_is_reported_with_its_index_both_patterns_and_its_ulps():
    expected = torch.ones(3, 4)
    actual = expected.clone()
    actual[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert message(actual, expected) == (
        "float32[3, 4] tensors differ: 1 of 12 elements\n"
        "  first: index (1, 2), 0x3f800001 where 0x3f800000 is expected\n"
        "  by at most 1 ULP; elements by ULPs: 0: 11, 1: 1"
    )


def test_a_message_of_the_callers_stands_first():
    assert message(torch.ones(1), torch.zeros(1), msg="after resuming").splitlines()[0] == "after resuming"


def test_zeros_of_two_signs_differ():
    assert "1 of 1 elements" in message(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_a_nan_equals_itself_and_no_other_payload():
    assert_bitwise_equal(nan_of_payload(1), nan_of_payload(1))
    assert "0x7fc00002 where 0x7fc00001 is expected" in message(nan_of_payload(2), nan_of_payload(1))


def test_dtype_is_compared_before_shape_and_shape_before_bits():
    assert message(torch.zeros(2, dtype=torch.bfloat16), torch.ones(3)) == (
        "dtypes differ: bfloat16[2] where float32[3] is expected"
    )
    assert message(torch.zeros(2), torch.ones(3)) == "shapes differ: float32[2] where float32[3] is expected"


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("q")])
def test_every_dtype_is_compared_by_its_bytes(name):
    expected, actual = raw(DTYPES[name]), raw(DTYPES[name])
    assert_bitwise_equal(actual, expected)
    actual.view(torch.uint8)[-1] ^= 1
    assert "1 of 4 elements" in message(actual, expected)


def test_a_difference_behind_the_first_slice_has_the_index_of_the_whole(monkeypatch):
    monkeypatch.setattr("bitproof.harness.compare.bits.SLICE", 5)
    expected = torch.ones(4, 6)
    actual = expected.clone()
    actual[3, 1] = 2.0
    assert "first: index (3, 1), 0x40000000" in message(actual, expected)


def test_structures_are_walked_and_the_place_is_reported():
    expected = {"a": [torch.ones(2), (torch.zeros(1), None)], "b": Point(1.0, State(3, torch.ones(1)))}
    actual = {"a": [torch.ones(2), (torch.zeros(1), None)], "b": Point(1.0, State(3, torch.ones(1)))}
    assert_bitwise_equal(actual, expected)
    actual["a"][0][1] = 2.0
    actual["b"].y.moment[0] = 3.0
    reported = message(actual, expected)
    assert re.findall(r"differ at (\S+):", reported) == ["['a'][0]", "['b'][1].moment"]


def test_missing_and_unexpected_keys_and_lengths_are_reported_before_values_are():
    assert message({"x": 1, "z": 2}, {"x": 1, "y": 2}) == "keys differ: missing 'y'; unexpected 'z'"
    assert message([1, 2], [1, 2, 3]) == "lengths differ: 2 where 3 is expected"


def test_types_of_containers_and_numbers_are_strict():
    assert message([1], (1,)) == "types differ: list where tuple is expected"
    assert message(True, 1) == "types differ: bool where int is expected"
    assert message({"x": torch.ones(1)}, {"x": [1.0]}) == "types differ at ['x']: Tensor where list is expected"


def test_numbers_agree_in_bits():
    assert_bitwise_equal([math.nan, 1j, "a", b"b", None], [math.nan, 1j, "a", b"b", None])
    assert message(-0.0, 0.0) == "values differ: -0.0 where 0.0 is expected"


def test_what_has_no_bits_is_refused_by_name():
    with pytest.raises(TypeError, match="it is a meta tensor"):
        assert_bitwise_equal(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match=r"it is a tensor of layout torch\.sparse_coo"):
        assert_bitwise_equal(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"object at \['x'\] has no bits to compare"):
        assert_bitwise_equal({"x": object()}, {"x": object()})


def test_ten_parts_are_reported_and_the_others_counted():
    reported = message([torch.ones(1)] * 12, [torch.zeros(1)] * 12)
    assert reported.count("tensors differ") == 10 and reported.endswith("and 2 more parts")


@pytest.mark.ranks
def test_a_dtensor_counts_as_its_local_shard_and_must_be_placed_alike():
    assert on_ranks(Parallelism(world_size=2, ep=1), _compare_dtensors) == ["1 of 2 elements", "equal"]


def _compare_dtensors(mesh) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    devices = init_device_mesh("cpu", (2,))
    expected = distribute_tensor(torch.arange(4.0), devices, [Shard(0)])
    actual = distribute_tensor(torch.arange(4.0), devices, [Shard(0)])
    whole = distribute_tensor(torch.arange(4.0), devices, [Replicate()])
    assert "how they are spread over ranks" in message(whole, actual)
    if dist.get_rank() == 0:
        actual.to_local()[1] = 5.0
    try:
        assert_bitwise_equal(actual, expected)
    except AssertionError as error:
        return re.search(r"\d of \d elements", str(error))[0]
    return "equal"
