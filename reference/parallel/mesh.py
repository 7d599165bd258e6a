"""The ranks of a case and their process groups, under names that are the same on every rank.

A traced graph names its groups. Were those names different on each rank, as a DeviceMesh makes them,
eight ranks could not run one graph; so a group is known here by what it is for, and every rank
registers its own instance under that name.

    fsdp    ranks that hold the same part of dense parameters, all ranks unless tp > 1: their shards, token counts
    efsdp   ranks that hold the same experts: shards of expert parameters
    ep      ranks that share one set of experts between them: token exchange
    tp      ranks that share each layer, and the text they read: sums of a layer's parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from harness.case import Parallelism
from reference.parallel.rank_order_group import RankOrderGroup

FSDP = "fsdp"
EXPERT_FSDP = "efsdp"
EXPERT = "ep"
TENSOR = "tp"
GROUP_NAMES = (FSDP, EXPERT_FSDP, EXPERT, TENSOR)

_joined: dict[str, dist.ProcessGroup] = {}
"""This process's groups: torch's registry holds them by weak references alone."""


@dataclass(frozen=True)
class Mesh:
    """One rank's place among all: rank r has `ep` coordinate r % ep and `efsdp` coordinate r // ep.

    Its `tp` coordinate is r % tp and its `fsdp` coordinate, which also chooses its text, r // tp.
    """

    rank: int
    parallelism: Parallelism

    def size(self, group: str) -> int:
        """How many ranks the named group has."""
        return len(self.partition(group)[0])

    def coordinate(self, group: str) -> int:
        """This rank's index within its instance of the named group."""
        return self.members(group).index(self.rank)

    def members(self, group: str) -> list[int]:
        """The ranks of this rank's instance of the named group, in the order of the group."""
        return next(ranks for ranks in self.partition(group) if self.rank in ranks)

    def partition(self, group: str) -> list[list[int]]:
        """Every instance of the named group: a partition of all ranks."""
        world, ep, tp = self.parallelism.world_size, self.parallelism.ep, self.parallelism.tp
        ranks = range(world)
        return {
            FSDP: [list(ranks[i::tp]) for i in range(tp)],
            EXPERT_FSDP: [list(ranks[i::ep]) for i in range(ep)],
            EXPERT: [list(ranks[i : i + ep]) for i in range(0, world, ep)],
            TENSOR: [list(ranks[i : i + tp]) for i in range(0, world, tp)],
        }[group]


def join_groups(mesh: Mesh, device: torch.device, store: dist.Store, *, backend: str, timeout: float = 1800.0) -> None:
    """Start torch.distributed on this rank and register the mesh's groups under their names.

    `backend` is "nccl" or "gloo". Collectives wait for at most `timeout` seconds. On gloo, sums are
    taken in rank order and CUDA tensors travel through host memory (see `RankOrderGroup`).
    """
    limit = timedelta(seconds=timeout)
    world_size = mesh.parallelism.world_size
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=mesh.rank, world_size=world_size, timeout=limit, device_id=device_id
    )
    for name in GROUP_NAMES:
        group = _new_subgroup(mesh.partition(name), mesh.rank, limit)
        _joined[name] = RankOrderGroup(group) if backend == "gloo" else group
        _register_process_group(cast(Any, name), _joined[name])


def leave_groups() -> None:
    """Undo `join_groups`; harmless when this rank never joined."""
    if not dist.is_initialized():
        return
    for name in GROUP_NAMES:
        _unregister_process_group(cast(Any, name))
    _joined.clear()
    dist.destroy_process_group()


def _new_subgroup(partition: Sequence[Sequence[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create every group of a partition, as all ranks must, and return the one that holds `rank`."""
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in partition]
    return next(group for group, ranks in zip(groups, partition, strict=True) if rank in ranks)
