"""What a rank holds of a DTensor, for each rank of meshes of eight ranks that never meet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bitproof.harness.capture.boxes import box_of, digests_of_cells
from bitproof.harness.capture.digest import digest
from bitproof.harness.records.layout import Box, joint_cuts

WHOLE = torch.arange(11 * 6, dtype=torch.float32).reshape(11, 6)


@pytest.fixture(params=range(8))
def rank(request):
    dist.init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def own_part(box: Box) -> torch.Tensor:
    """What a box says, taken from the whole."""
    part = WHOLE
    for dim, runs in enumerate(box.runs):
        part = part.index_select(dim, torch.cat([torch.arange(first, end) for first, end in runs]))
    return part


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Replicate(), Replicate()),
    ],
)
def test_the_box_names_what_torch_gave_the_rank_unevenly_sharded_and_empty_parts_too(rank, placements):
    mesh = init_device_mesh("cpu", (4, 2))
    local = WHOLE
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            size, here = mesh.size(axis), mesh.get_coordinate()[axis]
            local = placement._split_tensor(local, size, with_padding=False, contiguous=False)[0][here]
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())
    box = box_of(tensor)
    assert box is not None and box.shape == (11, 6)
    assert torch.equal(own_part(box), local)


def test_a_plain_tensor_a_partial_sum_and_a_part_of_another_size_have_no_box(rank):
    mesh = init_device_mesh("cpu", (8,))
    assert box_of(WHOLE) is None
    assert box_of(DTensor.from_local(WHOLE, mesh, [Partial()], run_check=False)) is None
    padded = DTensor.from_local(WHOLE, mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=(6, 1))
    assert box_of(padded) is None


def test_cells_are_digested_as_tensors_of_their_own():
    boxes = [Box((11, 6), (((0, 11),), ((0, 6),))), Box((11, 6), (((0, 4),), ((0, 6),)))]
    found = digests_of_cells(WHOLE, boxes[0], joint_cuts(boxes))
    assert found == digest(WHOLE[:4]) + digest(WHOLE[4:])
    assert digests_of_cells(WHOLE[:4], boxes[0], joint_cuts(boxes)) is None


def test_a_part_of_what_was_flattened_has_the_cells_of_whole_rows():
    part = WHOLE.reshape(-1)[9:30].clone()
    part._bitproof_flat = ((11, 6), 9, 30)
    box, rows = box_of(part), Box((11, 6), (((1, 5),), ((0, 6),)))
    assert str(box) == "[9:30] of flat [11, 6]"
    cuts = joint_cuts([box, rows.flat])
    assert cuts == ((6, 9, 30),)
    shared = digest(WHOLE.reshape(-1)[9:30])
    assert digests_of_cells(part, box, cuts) == shared
    assert digests_of_cells(own_part(rows), rows, cuts) == digest(WHOLE.reshape(-1)[6:9]) + shared
    part._bitproof_flat = ((11, 6), 9, 31)
    assert box_of(part) is None, "it is not as large as it is said to be"
