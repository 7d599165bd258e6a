from __future__ import annotations

import pytest
import torch

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.commands.record import diff
from bitproof.harness.compare.verdict import compare
from bitproof.harness.records import Verdict
from tests.harness.forging import make_recording
from tests.harness.judged import judge

CASE = Case(name="tiny", family="toys", reference="eager", steps=2, parallelism=Parallelism(world_size=2, ep=1))


def every(kind, make, step=None, rank=None):
    """A change of all tensors of a kind, or those of one step, or of one rank."""
    return lambda key, tensor: (
        make(tensor) if key.kind == kind and step in (None, key.step) and rank in (None, key.rank) else tensor
    )


def without_elements(tensor):
    return tensor.reshape(-1)[:0]


def nan_of_both_signs(tensor):
    found = torch.full_like(tensor, float("nan")).reshape(-1)
    found[::2] = -found[::2]
    return found.reshape(tensor.shape)


def infinite(tensor):
    found = torch.full_like(tensor, float("inf")).reshape(-1)
    found[::2] = -found[::2]
    return found.reshape(tensor.shape)


def judged(tmp_path, change, other=None):
    sides = [make_recording(tmp_path / name, CASE, change) for name, change in (("a", change), ("b", other or change))]
    recordings = [read_recording(side) for side in sides]
    controls = {
        f"{side}_control": compare(each, each, CASE)
        for side, each in zip(("reference", "candidate"), recordings, strict=True)
    }
    return judge(CASE, compare(*recordings, CASE), **controls)


def keep(key, tensor):
    return tensor


NO_EVIDENCE = "what agrees shows nothing, so it is no evidence\n  "


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (every("grad", torch.zeros_like), "on every rank each grad is all zeros at every step"),
        (every("grad", lambda x: -torch.zeros_like(x)), "on every rank each grad is all zeros at every step"),
        (every("grad", nan_of_both_signs), "on every rank each grad is all NaN at every step"),
        (every("loss", nan_of_both_signs), "on every rank each loss is all NaN at every step"),
        (every("loss", infinite), "on every rank each loss is all infinite or NaN at every step"),
        (every("grad", infinite), "on every rank each grad is all infinite or NaN at every step"),
        (every("param", infinite), "on every rank each param is all infinite or NaN at every step"),
        (every("optimizer", infinite), "on every rank each optimizer is all infinite or NaN at every step"),
        (every("grad", torch.zeros_like, step=1), "on every rank each grad is all zeros at step 1 of 2"),
        (every("param", without_elements), "on every rank each param is without elements at every step"),
        (every("optimizer", without_elements), "on every rank each optimizer is without elements at every step"),
    ],
)
def test_agreement_that_shows_nothing_is_no_evidence(tmp_path, change, reported):
    found = judged(tmp_path, change)
    assert (found.verdict, found.error) == (Verdict.UNVERIFIED, NO_EVIDENCE + reported)
    assert found.control == {"reference": "EQUAL", "candidate": "EQUAL"}


@pytest.mark.parametrize(
    "change",
    [every("grad", torch.zeros_like, rank=1), every("optimizer", torch.zeros_like), every("buffer", torch.zeros_like)],
)
def test_what_another_rank_shows_or_may_well_be_zero_stays_equal_without_a_word(tmp_path, change):
    found = judged(tmp_path, change)
    assert (found.verdict, found.error, found.remarks) == (Verdict.EQUAL, None, ())


def test_a_tensor_that_never_shows_anything_is_remarked_upon(tmp_path):
    sides = [make_recording(tmp_path / name, CASE, keep) for name in "ab"]
    recordings = [read_recording(side) for side in sides]
    for recording in recordings:
        for key, record in list(recording.records.items()):
            if key.kind == "grad":
                for name in ("idle.1", "idle.2", "idle.3", "idle.4"):
                    recording.records[key._replace(name=name)] = record._replace(content="zero")
    found = judge(CASE, compare(*recordings, CASE))
    assert found.verdict == Verdict.EQUAL
    assert found.remarks == (
        "4 of 5 grad tensors show nothing by their agreement, being all zeros at every step on every rank: "
        "idle.1, idle.2, idle.3 and 1 more",
    )


def test_zeros_against_something_else_are_a_difference(tmp_path):
    assert judged(tmp_path, every("grad", torch.zeros_like), keep).verdict == Verdict.DIFFERENT
    assert (
        judged(tmp_path, every("grad", torch.zeros_like), every("grad", nan_of_both_signs)).verdict == Verdict.DIFFERENT
    )


def test_diff_does_not_take_it_for_equal_either(tmp_path):
    sides = [make_recording(tmp_path / name, CASE, every("grad", torch.zeros_like)) for name in "ab"]
    lines = []
    assert diff(*sides, show=lines.append) == 3
    assert lines[1] == NO_EVIDENCE + "on every rank each grad is all zeros at every step"
