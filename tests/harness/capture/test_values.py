from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open

from bitproof.harness.capture.digest import digest
from bitproof.harness.capture.selection import name_value
from bitproof.harness.capture.values import copy_value, open_values, write_values
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Record

WEIGHT, COUNTS = Key(0, "grad", "layers.0.w", 3), Key(1, "buffer", "counts@after_optimizer", 3)
VALUES = {WEIGHT: torch.tensor([[1.5, -0.0], [math.nan, math.inf]], dtype=torch.bfloat16), COUNTS: torch.arange(3)}


@pytest.fixture
def path(tmp_path):
    write_values(tmp_path / "values" / "rank3.safetensors", VALUES)
    return tmp_path / "values" / "rank3.safetensors"


def refusal(path, name=None):
    with pytest.raises(RecordingError) as error, open_values(path) as values:
        values.read(name or "0/grad/layers.0.w")
    return str(error.value)


def test_values_come_back_in_every_bit_by_step_kind_and_name(path):
    with open_values(path) as values:
        assert values.names == {"0/grad/layers.0.w", "1/buffer/counts@after_optimizer"}
        for key, tensor in VALUES.items():
            assert digest(values.read(name_value(key))) == digest(tensor)
    assert [child.name for child in path.parent.iterdir()] == ["rank3.safetensors"]


def test_the_file_is_a_plain_safetensors_file(path):
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["0/grad/layers.0.w", "1/buffer/counts@after_optimizer"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
        torch.ones(1, 1).expand(5, 7),
        torch.arange(8, dtype=torch.float16)[::2],
    ],
)
def test_scalars_empty_tensors_and_odd_strides_come_back(tmp_path, tensor):
    write_values(tmp_path / "v", {WEIGHT: copy_value(tensor)})
    with open_values(tmp_path / "v") as values:
        assert digest(values.read(name_value(WEIGHT))) == digest(tensor)


def test_a_copy_keeps_its_value_when_the_system_goes_on_in_place():
    tensor = torch.ones(3)
    copied = copy_value(tensor)
    tensor.add_(1)
    assert copied.tolist() == [1, 1, 1]


def test_a_missing_file_is_refused(tmp_path):
    assert "is missing or damaged" in refusal(tmp_path / "none")


def test_a_file_cut_short_is_refused(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert "rank3.safetensors is missing or damaged" in refusal(path)


def test_a_file_with_bytes_behind_its_tensors_is_refused(path):
    path.write_bytes(path.read_bytes() + b"more")
    assert "rank3.safetensors is missing or damaged" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}'])
def test_what_is_no_safetensors_file_is_refused(path, content):
    path.write_bytes(content)
    assert "rank3.safetensors is missing or damaged" in refusal(path)


def test_a_header_that_claims_more_than_the_file_holds_is_refused(path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    assert "rank3.safetensors is missing or damaged" in refusal(path)


def test_a_tensor_that_is_not_there_is_refused_by_name(path):
    assert "lacks a value\n  expected: 2/grad/w" in refusal(path, "2/grad/w")


def test_values_that_could_not_be_written_leave_the_old_ones(path):
    before = path.read_bytes()
    with pytest.raises(Exception):  # noqa: B017
        write_values(path, {WEIGHT: "no tensor"})  # type: ignore[dict-item]
    assert path.read_bytes() == before


def test_a_value_is_given_only_with_the_digest_that_was_recorded(path):
    record = Record(digest(VALUES[WEIGHT]), "bfloat16", (2, 2))
    with open_values(path) as values:
        assert digest(values.read_recorded(WEIGHT, record)) == record.digest
        with pytest.raises(RecordingError) as error:
            values.read_recorded(WEIGHT, record._replace(digest="0" * 32))
    assert str(error.value) == (
        f"RecordingError: {path} holds another value than was recorded\n"
        f"  expected: 0/grad/layers.0.w with digest {'0' * 32}\n"
        f"  found: bfloat16[2, 2] with digest {record.digest}\n"
        "  fix: record the system again"
    )


def test_a_rank_of_which_nothing_was_chosen_has_a_file_without_tensors(tmp_path):
    write_values(tmp_path / "rank0.safetensors", {})
    with open_values(tmp_path / "rank0.safetensors") as values:
        assert values.names == frozenset()


@pytest.mark.parametrize("offsets", [[0, 8], [8, 16], [4, 12], [-8, 0], [8, 0]])
def test_tensors_that_overlap_or_leave_gaps_or_lie_outside_are_refused(path, offsets):
    tensors = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    tensors["y"] = {"dtype": "F32", "shape": [2], "data_offsets": offsets}
    if offsets == [8, 16]:
        tensors["x"]["shape"] = [3]  # more than its bytes hold
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    assert "rank3.safetensors is missing or damaged" in refusal(path, "y")


def test_others_may_read_the_file(path):
    assert path.stat().st_mode & 0o777 == 0o644
