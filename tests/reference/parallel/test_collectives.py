"""Collectives by name: called as operators where somebody watches, and as methods of the group where nobody does."""

import pytest
import torch

from bitproof.harness.case import Parallelism
from bitproof.harness.torch_compat import TorchDispatchMode
from bitproof.reference.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tests.ranks import on_ranks

pytestmark = pytest.mark.ranks

TWO = Parallelism(world_size=2, ep=2)


class Watcher(TorchDispatchMode):
    """Notes the operators that are called while it is entered."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function).split(".")[-2])
        return function(*args, **kwargs or {})


def collectives(rank):
    """What each gives of tensors with gaps, one of them without rows for the other rank."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))[:, ::2]
    sent, received = ([1, 3], [1, 0]) if rank == 0 else ([0, 4], [3, 4])
    found = [
        all_gather(x, 2, "fsdp"),
        reduce_scatter(x, 2, "fsdp"),
        all_reduce(x, "fsdp"),
        all_to_all(x, received, sent, "fsdp"),
    ]
    return [[list(y.shape), y.is_contiguous(), y.tolist()] for y in found]


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_watched_or_not_they_give_the_same_bits_and_watched_they_are_operators(transport):
    def body(mesh):
        unwatched, watcher = collectives(mesh.rank), Watcher()
        with watcher:
            watched = collectives(mesh.rank)
        return [unwatched == watched, [shape for shape, _, _ in unwatched], all(flag for _, flag, _ in unwatched), [
            name for name in watcher.seen if not name.startswith(("empty", "new_empty", "clone", "slice"))
        ]]  # fmt: skip

    launches = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"]
    seen = [name for launch in launches for name in (launch, "wait_tensor")]
    (first, second) = on_ranks(TWO, body, collectives=transport)
    assert first[:3] == [True, [[8, 3], [2, 3], [4, 3], [1, 3]], True]
    assert second[:3] == [True, [[8, 3], [2, 3], [4, 3], [7, 3]], True]
    assert all([name for name in found[3] if name in {*launches, "wait_tensor"}] == seen for found in (first, second))


def test_a_gradient_comes_back_through_the_operator_and_a_group_that_is_torchs_own_is_called_by_it():
    def body(mesh):
        import torch.distributed as dist

        from bitproof.harness.torch_distributed import register_group

        x = torch.ones(2, requires_grad=True)
        gathered = all_gather(x, 2, "fsdp")
        own = dist.group.WORLD
        register_group("own", own)
        return [gathered.requires_grad, all_gather(x.detach(), 2, "own").tolist()]

    assert on_ranks(TWO, body) == [[True, [1.0] * 4]] * 2
