from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from bitproof.harness.case import Parallelism
from bitproof.reference.parallel import mesh as meshes
from bitproof.reference.parallel.mesh import (
    EXPERT,
    EXPERT_FSDP,
    FSDP,
    GROUP_NAMES,
    TENSOR,
    Mesh,
    ensure_group,
    leave_groups,
)
from bitproof.reference.parallel.rank_order_group import LoneGroup
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


@pytest.mark.ranks
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


def test_groups_are_objects_of_their_own_unless_the_case_shares_them():
    def objects(**settings):
        mesh = Mesh(0, Parallelism(world_size=4, **settings))
        return [mesh.object_of(name) for name in (FSDP, EXPERT_FSDP, EXPERT)]

    assert objects(ep=4) == [FSDP, EXPERT_FSDP, EXPERT]
    assert objects(ep=4, shared_groups=True) == [FSDP, EXPERT_FSDP, FSDP], "experts over all ranks"
    assert objects(ep=1, shared_groups=True) == [FSDP, FSDP, EXPERT], "expert parameters over all ranks"
    assert objects(ep=2, shared_groups=True) == [FSDP, EXPERT_FSDP, EXPERT]


@pytest.mark.ranks
@pytest.mark.parametrize("shared", [False, True])
def test_names_of_one_object_are_registered_for_one_process_group(shared):
    def body(mesh):
        groups = [_resolve_process_group(name) for name in (FSDP, EXPERT_FSDP, EXPERT)]
        return [groups[0] is groups[1], groups[0] is groups[2], groups[1] is groups[2]]

    parallelism = Parallelism(world_size=2, ep=2, shared_groups=shared)
    assert on_ranks(parallelism, body) == [[False, shared, False]] * 2


@pytest.mark.ranks
def test_a_group_that_a_graph_asks_for_is_made_once():
    def body(mesh):
        ensure_group("extra", ((0,), (1, 2)))
        first = _resolve_process_group("extra")
        ensure_group("extra", [[0], [1, 2]], high_priority=True)
        return [_resolve_process_group("extra") is first, first.size(), first.rank()]

    assert on_ranks(Parallelism(world_size=3, ep=1), body) == [[True, 1, 0], [True, 2, 0], [True, 2, 1]]


@pytest.mark.ranks
def test_ranks_out_of_order_are_refused():
    def body(mesh):
        with pytest.raises(ValueError, match=r"^group turned lists ranks out of order: \[\[1, 0\]\]$"):
            ensure_group("turned", ((1, 0),))
        return True

    assert on_ranks(Parallelism(world_size=2, ep=1), body) == [True, True]


@pytest.mark.ranks
def test_a_group_name_cannot_stand_for_other_ranks():
    def body(mesh):
        with pytest.raises(ValueError, match=r"^group ep exists, over \[\[0, 1\]\], not \[\[0\], \[1\]\]$"):
            ensure_group(EXPERT, [[0], [1]])
        return True

    assert on_ranks(Parallelism(world_size=2, ep=2), body) == [True, True]


@pytest.mark.ranks
def test_leaving_forgets_the_groups_that_a_graph_asked_for():
    def body(mesh):
        ensure_group("extra", mesh.partition(FSDP))
        dist.barrier()
        leave_groups()
        with pytest.raises(RuntimeError, match="extra"):
            _resolve_process_group("extra")
        return [len(meshes.joined_groups), len(meshes.partitions), len(meshes.time_limits)]

    assert on_ranks(Parallelism(world_size=2, ep=1), body) == [[0, 0, 0]] * 2


def making(monkeypatch, partition, backend="gloo", rank=3):
    """What a rank asks torch for to make a group over each part, and what group it gets."""
    asked = []
    state = {
        "time_limits": [timedelta(seconds=5)],
        "_wraps": [lambda group: group],
        "joined_groups": {},
        "partitions": {},
    }
    for name, value in state.items():
        monkeypatch.setattr(meshes, name, value)
    monkeypatch.setattr(meshes.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(meshes.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(meshes.dist, "new_group", lambda ranks, **given: asked.append(ranks) or "group")
    monkeypatch.setattr(meshes.dist, "split_group", lambda *, split_ranks, **given: asked.append(split_ranks) or "part")
    made = []
    monkeypatch.setattr(meshes, "register_group", lambda name, group: made.append(group))
    ensure_group("own", partition)
    return asked, made[0]


def test_a_rank_makes_one_group_however_many_parts_there_are_and_none_where_all_are_alone(monkeypatch):
    assert making(monkeypatch, [[0, 1], [2, 3]]) == ([[2, 3]], "group")
    assert making(monkeypatch, [[0, 1], [2, 3]], "nccl") == ([[[0, 1], [2, 3]]], "part"), "one split for all parts"
    for backend in ("gloo", "nccl"):
        asked, group = making(monkeypatch, [[0], [1], [2], [3]], backend)
        assert asked == [] and isinstance(group, LoneGroup)


def test_parts_of_several_sizes_are_made_by_all_ranks(monkeypatch):
    assert making(monkeypatch, [[0], [1, 2, 3]])[0] == [[0], [1, 2, 3]]
