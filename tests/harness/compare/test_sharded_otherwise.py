"""Tensors that lie otherwise on the ranks: what is recorded of them, and what comparisons say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import read_recording, write_recording
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.closeness import measure
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Manifest, Recording, Verdict
from tests.harness.forging import make_recording
from tests.harness.judged import judge

CASE = Case(
    name="mine", family="mine", reference="a:b", candidate="a:c", steps=1, parallelism=Parallelism(world_size=1, ep=1)
)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def recorded(weight: torch.Tensor) -> Recording:
    recorder = Recorder(0)
    recorder.observe("loss", "loss", torch.tensor(1.0))
    for kind in ("grad", "param", "optimizer"):
        recorder.observe(kind, "w", weight)
    manifest = {"case": CASE.to_dict(), "system": "s", "world_size": 1, "steps": 1}
    return Recording(Manifest.of(manifest), recorder.rows)


def part(mesh, rows: int) -> DTensor:
    """Rank 0's part of a tensor of 8 rows."""
    local = torch.arange(rows * 4.0).reshape(rows, 4)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8, 4]), stride=(4, 1))


def test_a_dtensors_record_has_its_local_shape_and_its_placements(mesh, tmp_path):
    record = recorded(part(mesh, 5)).records[Key(0, "grad", "w", 0)]
    assert (record.shape, record.placements) == ((5, 4), "Shard(dim=0) of [8, 4] over [1]")
    plain = recorded(torch.ones(5, 4)).records[Key(0, "grad", "w", 0)]
    assert (plain.shape, plain.placements) == ((5, 4), None)


def test_placements_are_read_again_and_recordings_without_any_are_as_they_were(mesh, tmp_path):
    for name, tensor in (("sharded", part(mesh, 4)), ("plain", torch.ones(4, 4))):
        recording = recorded(tensor)
        write_recording(tmp_path / name, recording.manifest, recording.records.items())
        assert read_recording(tmp_path / name).records == recording.records
    import pyarrow.parquet

    assert "placements" in pyarrow.parquet.read_schema(tmp_path / "sharded" / "digests.parquet").names
    assert "placements" not in pyarrow.parquet.read_schema(tmp_path / "plain" / "digests.parquet").names


def test_two_layouts_are_reported_as_sharded_otherwise_and_never_held_against_a_bound(mesh):
    whole = recorded(torch.ones(8, 4))
    found = compare(whole, recorded(part(mesh, 4)), CASE)
    assert found.verdict == Verdict.DIFFERENT and found.is_sharded_otherwise
    assert found.layout_mismatches[0] == (
        "step 0, rank 0, grad w: sharded otherwise: float32[8, 4] in the reference, "
        "float32[4, 4], Shard(dim=0) of [8, 4] over [1] in the candidate"
    )
    assert judge(CASE, found).verdict == Verdict.DIFFERENT
    bounded = judge(replace(CASE, expected="CLOSE", close_within=0.1), found)
    assert bounded.verdict == Verdict.UNVERIFIED
    assert "nothing can be compared with the case's bound of 0.1" in bounded.error
    assert "full_tensor()" in bounded.error


def test_equal_parts_of_other_layouts_that_differ_in_value_have_no_partners_either(mesh):
    replicated = DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()], run_check=False)
    found = compare(recorded(replicated), recorded(part(mesh, 4)), CASE)
    assert found.is_sharded_otherwise and "sharded otherwise" in found.layout_mismatches[0]


def test_one_layout_is_compared_as_ever(mesh):
    assert compare(recorded(part(mesh, 4)), recorded(part(mesh, 4)), CASE).verdict == Verdict.EQUAL
    dtype = compare(recorded(torch.ones(4)), recorded(torch.ones(4).double()), CASE)
    assert not dtype.is_sharded_otherwise and "sharded" not in dtype.layout_mismatches[0]
    assert judge(replace(CASE, expected="CLOSE", close_within=0.1), dtype).verdict == Verdict.DIFFERENT


def test_values_of_two_sizes_are_refused_where_closeness_is_measured(tmp_path):
    first = make_recording(tmp_path / "a", CASE)
    grown = make_recording(tmp_path / "b", CASE, lambda key, x: torch.cat([x, x]) if key.kind == "param" else x)
    with pytest.raises(RecordingError) as error:
        measure(first, grown, 0.1)
    assert error.value.what == "step 0, rank 0, param w is of two sizes: a bound says nothing of it"
