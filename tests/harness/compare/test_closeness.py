from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch

from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import join_parts, write_part
from bitproof.harness.capture.selection import ALL
from bitproof.harness.capture.values import write_values
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.closeness import measure, relative_error, ulp_counts
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import BUCKETS, Key, Manifest
from tests.harness.forging import vouch

RANKS, STEPS = 2, 2
CASE = Case(
    name="near",
    family="x",
    reference="a:b",
    candidate="c:d",
    expected="CLOSE",
    close_within=0.01,
    steps=STEPS,
    parallelism=Parallelism(world_size=RANKS, ep=1),
)


def recorded(folder, change=lambda key, tensor: tensor):
    """A recording of two ranks and two steps whose tensors `change` may change."""
    work, parts, files = folder.with_name(folder.name + "-work"), [], []
    for rank in range(RANKS):
        recorder = Recorder(rank, patterns=ALL)
        for recorder.step in range(STEPS):
            for kind, name, tensor in (
                ("loss", "loss", torch.tensor(2.0)),
                ("grad", "w", torch.linspace(1, 2, 8, dtype=torch.bfloat16)),
                ("buffer", "counts@after_optimizer", torch.arange(4)),
                ("param", "w", torch.full((2, 2), 0.5)),
            ):
                recorder.observe(kind, name, change(Key(recorder.step, kind, name, rank), tensor.clone()))
        parts.append(work / f"{rank}.parquet")
        files.append(work / f"{rank}.safetensors")
        write_part(parts[-1], recorder.rows.items())
        write_values(files[-1], recorder.values)
    manifest = Manifest(case=CASE.to_dict(), system="toy", world_size=RANKS, steps=STEPS)
    join_parts(folder, manifest, parts, files)
    return folder


def at(wanted, make):
    return lambda key, tensor: make(tensor) if key == wanted else tensor


def counts(*args) -> dict[str, int]:
    return {name: n for name, n in zip(BUCKETS, ulp_counts(*args).tolist(), strict=True) if n}


def ulps_from(x, *distances):
    """Copies of one number, each some representable values further from zero."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.stack([(x.view(integer) + d).view(x.dtype) for d in distances])


# One pair of tensors.


def test_the_relative_error_is_the_distance_over_the_reference_norm():
    reference = torch.tensor([3.0, 0.0, 4.0])
    assert relative_error(reference, torch.tensor([3.0, 0.5, 4.0])) == pytest.approx(0.1, rel=1e-12)
    assert relative_error(reference, reference.clone()) == 0.0


def test_the_error_is_relative_to_the_reference_not_to_the_candidate():
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert (relative_error(one, two), relative_error(two, one)) == (1.0, 0.5)


def test_bfloat16_is_measured_in_float64():
    reference = torch.full((1000,), 256.0, dtype=torch.bfloat16)
    candidate = reference.clone()
    candidate[0] = 258  # the next number
    assert relative_error(reference, candidate) == pytest.approx(2 / (256 * math.sqrt(1000)), rel=1e-12)


def test_tiny_and_huge_float64s_neither_under_nor_overflow():
    for scale in (1e-320, 1e-200, 1e200, 1e307):
        reference = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
        candidate = torch.tensor([3.0, 4.5], dtype=torch.float64) * scale
        assert relative_error(reference, candidate) == pytest.approx(0.1, rel=1e-2)


def test_the_sign_of_a_zero_differs_in_bits_and_not_in_size():
    zero = torch.tensor([0.0])
    assert relative_error(zero, -zero) == 0.0
    assert counts(zero, -zero) == {"1": 1}


def test_a_difference_from_zeros_is_infinite():
    assert relative_error(torch.zeros(2), torch.tensor([0.0, 1e-30])) == math.inf


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_nan_or_an_infinity_on_one_side_alone_is_infinitely_far(odd):
    plain, strange = torch.tensor([1.0, 2.0]), torch.tensor([1.0, odd])
    for pair in ((plain, strange), (strange, plain)):
        assert relative_error(*pair) == math.inf
        assert counts(*pair) == {"0": 1, "unlike": 1}


def test_infinities_of_both_signs_are_infinitely_far():
    assert relative_error(torch.tensor([math.inf]), torch.tensor([-math.inf])) == math.inf
    assert counts(torch.tensor([math.inf]), torch.tensor([-math.inf])) == {"unlike": 1}


def test_what_is_not_finite_on_both_sides_alike_adds_nothing():
    reference = torch.tensor([math.nan, math.inf, 3.0, 4.0])
    candidate = torch.tensor([math.nan, math.inf, 3.0, 4.5])
    assert relative_error(reference, candidate) == pytest.approx(0.1, rel=1e-12)


def test_integers_and_booleans_are_equal_in_bits_or_infinitely_far():
    assert relative_error(torch.arange(3), torch.arange(3)) == 0.0
    assert relative_error(torch.tensor([1, 10**9]), torch.tensor([1, 10**9 + 1])) == math.inf
    assert counts(torch.tensor([1, 2]), torch.tensor([1, 3])) == {"0": 1, "unlike": 1}
    assert counts(torch.tensor([True, True]), torch.tensor([True, False])) == {"0": 1, "unlike": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_buckets_hold_distances_up_to_the_next_power_of_two(dtype):
    distances = (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)
    x = torch.tensor(1.0, dtype=dtype)
    assert counts(x.expand(10).clone(), ulps_from(x, *distances)) == {
        "0": 1,
        "1": 1,
        "2": 1,
        "3-4": 2,
        "5-8": 2,
        "9-16": 2,
        "17-32": 1,
    }


def test_the_largest_distance_of_two_float64s_has_a_bucket():
    left, right = (torch.tensor([x, 1.0], dtype=torch.float64) for x in (-1.7e308, 1.7e308))
    assert counts(left, right) == {"0": 1, BUCKETS[-2]: 1}


def test_a_scalar_and_an_empty_tensor_are_counted():
    assert counts(torch.tensor(1.0), torch.tensor(1.0)) == {"0": 1}
    assert counts(torch.zeros(0), torch.zeros(0)) == {}


# Two recordings.


def test_the_largest_error_and_every_element_are_reported(tmp_path):
    grad = Key(1, "grad", "w", 1)
    reference = recorded(tmp_path / "a")
    candidate = recorded(tmp_path / "b", at(grad, lambda x: x * 1.0078125))
    found = measure(reference, candidate, 0.01)
    assert found.is_within and found.tensors_beyond == 0 and found.first_beyond is None
    assert found.largest == grad
    assert 0.006 < found.largest_error < 0.009
    assert {kind: sum(row.values()) for kind, row in found.histogram.items()} == {
        "loss": 4,
        "grad": 32,
        "buffer": 16,
        "param": 16,
    }
    assert found.histogram["param"] == {"0": 16}
    assert found.histogram["grad"]["0"] == 24


def test_just_within_and_just_beyond_the_bound(tmp_path):
    reference = recorded(tmp_path / "a")
    candidate = recorded(tmp_path / "b", at(Key(0, "loss", "loss", 0), lambda x: x * 1.25))
    assert measure(reference, candidate, 0.25).is_within
    found = measure(reference, candidate, 0.2499)
    assert not found.is_within
    assert (found.first_beyond, found.first_beyond_error, found.tensors_beyond) == (Key(0, "loss", "loss", 0), 0.25, 1)


def test_the_first_tensor_beyond_the_bound_is_first_in_the_order_of_computation(tmp_path):
    reference = recorded(tmp_path / "a")
    candidate = recorded(tmp_path / "b", lambda key, x: x * 1.5 if key.kind in ("grad", "param") and key.rank else x)
    found = measure(reference, candidate, 0.01)
    assert found.first_beyond == Key(0, "grad", "w", 1)
    assert found.tensors_beyond == 4


def test_a_nan_has_no_finite_error(tmp_path):
    reference = recorded(tmp_path / "a")
    candidate = recorded(tmp_path / "b", at(Key(0, "param", "w", 0), lambda x: x / 0 * 0))
    found = measure(reference, candidate, 0.01)
    assert (found.largest_error, found.largest, found.first_beyond_error) == (None, Key(0, "param", "w", 0), None)
    assert not found.is_within


# Evidence that is not whole.


@pytest.fixture
def pair(tmp_path):
    return recorded(tmp_path / "a"), recorded(tmp_path / "b", at(Key(0, "grad", "w", 0), lambda x: x * 1.0078125))


def refusal(pair):
    with pytest.raises(RecordingError) as error:
        measure(*pair, 0.01)
    return str(error.value)


def tensors_of(folder, rank=0):
    from safetensors.torch import load_file

    return load_file(folder / "values" / f"rank{rank}.safetensors")


def replace_tensors(folder, tensors, rank=0):
    from safetensors.torch import save_file

    save_file(tensors, folder / "values" / f"rank{rank}.safetensors")
    vouch(folder)


def test_a_flipped_bit_in_the_values_is_refused(pair):
    path = pair[1] / "values" / "rank1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "rank1.safetensors is damaged, or not the one that manifest.json was written with" in refusal(pair)


def test_a_value_other_than_the_recorded_one_is_refused_though_the_manifest_vouches_for_it(pair):
    tensors = tensors_of(pair[1])
    tensors["0/grad/w"] = tensors_of(pair[0])["0/grad/w"]  # what would make the candidate look close
    replace_tensors(pair[1], tensors)
    assert "rank0.safetensors holds another value than was recorded\n  expected: 0/grad/w with digest" in refusal(pair)


def test_a_missing_tensor_is_refused_by_name(pair):
    tensors = tensors_of(pair[0])
    del tensors["1/param/w"]
    replace_tensors(pair[0], tensors)
    assert "expected: 8 tensors\n  found: 7; 1/param/w is missing" in refusal(pair)


def test_an_extra_tensor_is_refused_by_name(pair):
    replace_tensors(pair[0], tensors_of(pair[0]) | {"1/param/odd": torch.zeros(1)})
    assert "expected: 8 tensors\n  found: 9; 1/param/odd is extra" in refusal(pair)


def test_a_file_cut_short_is_refused_though_the_manifest_vouches_for_it(pair):
    path = pair[0] / "values" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    vouch(pair[0])
    assert "rank0.safetensors is missing or damaged" in refusal(pair)


def test_a_ranks_missing_file_is_refused(pair):
    (pair[1] / "values" / "rank1.safetensors").unlink()
    assert "rank1.safetensors cannot be read" in refusal(pair)


def test_a_link_to_no_regular_file_is_refused(pair):
    path = pair[1] / "values" / "rank1.safetensors"
    path.unlink()
    path.mkdir()
    assert "rank1.safetensors is not a regular file" in refusal(pair)


@pytest.mark.parametrize("known", [None, [], ["0" * 64]])
def test_a_recording_whose_manifest_knows_no_values_for_every_rank_is_refused(pair, known):
    vouch(pair[0], values_sha256=known)
    assert "a holds no values\n  expected: values of 2 ranks, which a case with a bound records" in refusal(pair)


def test_recordings_of_other_tensors_are_refused(pair, tmp_path):
    other = recorded(tmp_path / "c", lambda key, x: x)
    shutil.rmtree(pair[1])
    case = replace(CASE, steps=1)
    assert case.close_within == 0.01
    work = Recorder(0, patterns=ALL)
    work.observe("loss", "loss", torch.tensor(1.0))
    write_part(tmp_path / "p", work.rows.items())
    write_values(tmp_path / "v", work.values)
    manifest = Manifest(case=case.to_dict(), system="toy", world_size=1, steps=1)
    join_parts(pair[1], manifest, [tmp_path / "p"], [tmp_path / "v"])
    assert "two recordings without the same tensors have no values to compare" in refusal((other, pair[1]))


def test_one_step_may_be_measured_alone(tmp_path):
    later = at(Key(1, "grad", "w", 1), lambda tensor: tensor * 1000)
    pair = recorded(tmp_path / "a"), recorded(tmp_path / "b", later)
    assert measure(*pair, 0.01, step=0).is_within
    found = measure(*pair, 0.01, step=1)
    assert (found.is_within, found.first_beyond) == (False, Key(1, "grad", "w", 1))
    with pytest.raises(RecordingError, match="no values of step 2"):
        measure(*pair, 0.01, step=2)
