import pytest
import torch.distributed as dist

from harness.case import Parallelism
from reference.parallel.mesh import EXPERT, EXPERT_FSDP, FSDP, GROUP_NAMES, TENSOR, Mesh
from tests.ranks import on_ranks


def test_eight_ranks_with_two_expert_shards_split_into_four_times_two():
    mesh = Mesh(5, Parallelism(world_size=8, ep=2))
    assert mesh.partition(FSDP) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert mesh.partition(EXPERT) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.partition(EXPERT_FSDP) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [mesh.coordinate(name) for name in (FSDP, EXPERT_FSDP, EXPERT)] == [5, 2, 1]


@pytest.mark.parametrize("world_size, ep", [(1, 1), (2, 2), (4, 1), (8, 8), (6, 3)])
def test_every_group_is_a_partition_of_all_ranks(world_size, ep):
    mesh = Mesh(0, Parallelism(world_size=world_size, ep=ep))
    for name in GROUP_NAMES:
        assert sorted(rank for ranks in mesh.partition(name) for rank in ranks) == list(range(world_size))


def test_groups_are_gone_after_leaving():
    def body(mesh):
        return dist.get_world_size()

    assert on_ranks(Parallelism(world_size=2, ep=1), body) == [2, 2]
    assert not dist.is_initialized()


def test_eight_ranks_with_four_tensor_ranks_each_read_two_texts():
    mesh = Mesh(5, Parallelism(world_size=8, ep=1, tp=4))
    assert mesh.partition(TENSOR) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.partition(FSDP) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [mesh.coordinate(name) for name in (FSDP, TENSOR)] == [1, 1]
    assert mesh.size(FSDP) == mesh.parallelism.data_ranks
