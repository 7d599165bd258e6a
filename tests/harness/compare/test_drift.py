from __future__ import annotations

import pytest
import torch

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.drift import measure_drift
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Drift, Key
from tests.harness.forging import at, flip_lowest_bit, make_recording, vouch

CASE = Case(
    name="toy", family="x", reference="a:b", candidate="c:d", steps=2, parallelism=Parallelism(world_size=2, ep=1)
)
GRAD = Key(1, "grad", "w", 1)


def drift(tmp_path, change, patterns=("*",)):
    left = make_recording(tmp_path / "a", CASE, patterns=patterns)
    return measure_drift(left, make_recording(tmp_path / "b", CASE, change, patterns=patterns))


def test_recordings_with_the_same_bits_have_no_drift(tmp_path):
    assert drift(tmp_path, lambda key, tensor: tensor) == []


def test_a_flipped_bit_is_reported_whole(tmp_path):
    assert drift(tmp_path, at(GRAD, flip_lowest_bit)) == [
        Drift(
            kind="grad",
            name="w",
            step=1,
            rank=1,
            records=1,
            measured=1,
            elements_differing=1,
            elements=8,
            max_ulp=1,
            reference_bits="0x3f80",
            candidate_bits="0x3f81",
            reference_type="bfloat16[8]",
            candidate_type="bfloat16[8]",
            histogram={"1": 1},
        )
    ]


def test_records_of_one_tensor_add_up_and_tensors_come_in_the_order_of_computation(tmp_path):
    def change(key, tensor):
        if key.kind == "param" and key.step == 0:
            return tensor + 2.0**-23 * (5 - 4 * key.rank)  # 10 ULPs of 0.5, and 2
        return flip_lowest_bit(tensor) if key.kind == "grad" and key.step == 1 else tensor

    param, grad = drift(tmp_path, change)
    assert (param.kind, param.step, param.rank, param.records) == ("param", 0, 0, 2)
    assert (param.elements_differing, param.elements, param.max_ulp) == (8, 8, 10)
    assert list(param.histogram.items()) == [("2", 4), ("9-16", 4)], "in order, whatever came first"
    assert (param.reference_bits, param.candidate_bits) == ("0x3f000000", "0x3f00000a")
    assert (grad.kind, grad.step, grad.records, grad.elements) == ("grad", 1, 2, 16)


def test_only_kept_values_are_measured_and_the_rest_is_counted(tmp_path):
    [entry] = drift(tmp_path, lambda key, t: flip_lowest_bit(t) if key.kind == "grad" else t, patterns=("1/*",))
    assert (entry.step, entry.rank, entry.records, entry.measured) == (0, 0, 4, 2)
    assert (entry.elements, entry.elements_differing) == (16, 2)


@pytest.mark.parametrize("patterns", [(), ("*/param/*",)])
def test_without_values_the_tensor_is_still_named(tmp_path, patterns):
    [entry] = drift(tmp_path, at(GRAD, flip_lowest_bit), patterns)
    assert (entry.kind, entry.name, entry.records, entry.measured) == ("grad", "w", 1, 0)
    assert entry.elements is entry.max_ulp is entry.reference_bits is None


def test_values_that_one_side_alone_keeps_are_not_measured(tmp_path):
    left = make_recording(tmp_path / "a", CASE)
    right = make_recording(tmp_path / "b", CASE, at(GRAD, flip_lowest_bit), patterns=())
    assert [entry.measured for entry in measure_drift(left, right)] == [0]


def test_integers_differ_without_ulps(tmp_path):
    [entry] = drift(tmp_path, at(Key(0, "buffer", "counts@after_optimizer", 0), lambda tensor: tensor + 1))
    assert (entry.elements_differing, entry.max_ulp, entry.histogram) == (4, None, {"unlike": 4})


def test_a_zero_of_another_sign_is_one_ulp_away(tmp_path):
    [entry] = drift(tmp_path, at(Key(0, "optimizer", "w.exp_avg", 0), lambda tensor: -tensor))
    assert (entry.elements_differing, entry.max_ulp) == (4, 1)


def test_another_shape_is_reported_and_not_measured(tmp_path):
    [entry] = drift(tmp_path, at(Key(0, "param", "w", 1), lambda tensor: tensor.reshape(4)))
    assert (entry.reference_type, entry.candidate_type, entry.measured) == ("float32[2, 2]", "float32[4]", 0)


def test_a_value_other_than_the_recorded_one_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    left = make_recording(tmp_path / "a", CASE)
    right = make_recording(tmp_path / "b", CASE, at(GRAD, flip_lowest_bit))
    path = right / "values" / "rank1.safetensors"
    save_file(load_file(path) | {"1/grad/w": torch.ones(8, dtype=torch.bfloat16)}, path)
    with pytest.raises(RecordingError, match=r"damaged, or not the one that manifest.json was written with"):
        measure_drift(left, right)
    vouch(right)
    with pytest.raises(RecordingError, match=r"rank1.safetensors holds another value than was recorded"):
        measure_drift(left, right)


def test_a_value_that_was_not_recorded_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    left = make_recording(tmp_path / "a", CASE)
    right = make_recording(tmp_path / "b", CASE, at(GRAD, flip_lowest_bit))
    path = right / "values" / "rank1.safetensors"
    save_file(load_file(path) | {"../../outside": torch.ones(1)}, path)
    vouch(right)
    with pytest.raises(RecordingError) as error:
        measure_drift(left, right)
    assert str(error.value) == (
        f"RecordingError: {path} holds a tensor that was not recorded\n"
        "  found: ../../outside\n"
        "  fix: record the system again"
    )


def test_the_first_of_a_tensor_s_records_is_the_one_computed_first_though_a_lower_rank_differs_later(tmp_path):
    def change(key, tensor):
        return flip_lowest_bit(tensor) if key.kind == "param" and (key.step, key.rank) in ((1, 0), (0, 1)) else tensor

    (entry,) = drift(tmp_path, change)
    assert (entry.step, entry.rank, entry.records) == (0, 1, 2)
