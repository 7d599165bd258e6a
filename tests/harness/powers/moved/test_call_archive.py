"""Damaged and forged archives are refused with a sentence, and nothing in them is run."""

import copy
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from bitproof.harness.powers.moved.standalone.call_archive import MAX_CALL, Archive, read_json, write_json
from bitproof.harness.powers.moved.standalone.call_values import RefusedArchiveError, decode
from bitproof.harness.powers.moved.standalone.replaying import replay

NOTHING = (None, True, -1, 1 << 70, 1.5, "", "x" * 300, [], {}, [[]], "aten.from_file.default", float("inf"))
HARMLESS = {"failed", "not replayed", "missing", "signature", "equal", "moved", "nondeterministic"}


@pytest.fixture
def forged(archive_folder, tmp_path):
    """A copy of the archive; writes other content with a right digest."""
    folder = shutil.copytree(archive_folder, tmp_path / "forged")
    head = read_json(str(folder / "calls.json"))

    def write(change):
        made = copy.deepcopy(head)
        change(made)
        write_json(str(folder / "calls.json"), made)
        return str(folder)

    return write


def test_an_archive_with_any_byte_changed_is_refused(archive_folder, tmp_path):
    folder = shutil.copytree(archive_folder, tmp_path / "damaged")
    path, draw = folder / "calls.json", random.Random(0)
    whole = path.read_bytes()
    for _ in range(150):
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(RefusedArchiveError):
            Archive(str(folder))
    for _ in range(50):
        path.write_bytes(whole[: draw.randrange(len(whole))])
        with pytest.raises(RefusedArchiveError):
            Archive(str(folder))


def test_values_with_any_byte_changed_are_not_replayed(archive_folder, tmp_path):
    folder = shutil.copytree(archive_folder, tmp_path / "damaged")
    path, draw = folder / "values.bin", random.Random(1)
    whole, archive = path.read_bytes(), Archive(str(folder))
    inputs = [s["block"] for call in archive.calls for s in call["storages"] if s["block"][1]]
    for _ in range(50):
        at, size, _ = draw.choice(inputs)
        at += draw.randrange(size)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = {row["state"] for row in replay(archive)["rows"].values()}
        assert "not replayed" in found and "moved" not in found
    path.write_bytes(whole[:100])
    with pytest.raises(RefusedArchiveError, match=r"outside of values\.bin"):
        Archive(str(folder))


def test_a_forged_field_of_a_call_is_refused_or_its_call_is_not_judged(forged):
    """Each field in turn, with a digest that fits: 300 forgeries and more."""
    count, draw = 0, random.Random(2)
    for name in ("op", "args", "kwargs", "storages", "tensors", "settings", "results", "state", "key"):
        for value in NOTHING:
            for _ in range(3):
                at = draw.randrange(20)

                def change(head, at=at, name=name, value=value):
                    head["calls"] = [head["calls"][at] | {name: value}]

                count += _refused_or_harmless(forged(change))
    for field, name in (("storages", "size"), ("storages", "align"), ("tensors", "shape"), ("tensors", "offset")):
        for value in (*NOTHING, [1 << 49], [-1], [1 << 62] * 3, MAX_CALL):

            def change(head, field=field, name=name, value=value):
                head["calls"] = [next(call for call in head["calls"] if call[field])]
                head["calls"][0][field][0][name] = value

            count += _refused_or_harmless(forged(change))
    assert count > 300


def _refused_or_harmless(folder):
    try:
        found = replay(Archive(folder))
    except RefusedArchiveError:
        return 1
    assert {row["state"] for row in found["rows"].values()} <= HARMLESS
    return 1


@pytest.mark.parametrize(
    "name",
    [
        *("aten.from_file.default", "aten._print.default", "aten.set_.source_Storage", "aten.resize_.default"),
        *("os.system.default", "aten.__class__.default", "aten.mm.__class__", "prims.x.y z", "aten.mm", "aten/mm"),
        *("c10d.allreduce_.default", "quantized.add.default", "debugprims.load_tensor.default", "aten.mm.default\n"),
        *("aten._backward.default", "aten.record_stream.default", "higher_order.cond.default"),
    ],
)
def test_an_operator_with_effects_or_of_another_library_is_refused(forged, name):
    folder = forged(lambda head: head.update(calls=[head["calls"][0] | {"op": name}]))
    (row,) = replay(Archive(folder))["rows"].values()
    assert row["state"] == "not replayed"


def test_an_operator_that_this_torch_lacks_is_missing(forged):
    folder = forged(lambda head: head.update(calls=[head["calls"][0] | {"op": "aten.of_tomorrow.default"}]))
    (row,) = replay(Archive(folder))["rows"].values()
    assert (row["state"], row["detail"]) == ("missing", "this torch has no operator aten.of_tomorrow")


def test_a_call_with_another_signature_has_a_row_of_its_own(forged):
    call = {"op": "aten.relu.default", "kwargs": {"faster": ["b", True]}}
    folder = forged(lambda head: head.update(calls=[head["calls"][0] | call]))
    (row,) = replay(Archive(folder))["rows"].values()
    assert row["state"] == "signature"


@pytest.mark.parametrize(
    "value", [["t", 5], ["x", 1], ["i", True], ["f", "1e400x"], ["l", [["l", [["l", []]]]] * 3], 3]
)
def test_an_argument_that_is_none_is_refused(value):
    nested = value
    for _ in range(4):
        nested = ["l", [nested]]
    with pytest.raises(RefusedArchiveError):
        decode(nested, [torch.zeros(1)], None)


@pytest.mark.ranks
def test_a_forged_call_for_too_much_memory_fails_within_the_budget(forged, tmp_path):
    def change(head):
        size = [["i", 1 << 20], ["i", 1 << 18]]
        call = head["calls"][0] | {"op": "aten.zeros.default", "args": [["l", size]], "kwargs": {}}
        head["calls"] = [call | {"state": None, "storages": [], "tensors": []}]

    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({"folder": forged(change), "memory": 1 << 29}))
    from bitproof.harness.powers.moved.environments import START

    done = subprocess.run(
        [sys.executable, str(START), "replay", str(request), str(answer)], env=os.environ, timeout=300
    )
    assert done.returncode == 0
    (row,) = json.loads(answer.read_text())["rows"].values()
    assert row["state"] == "failed"
