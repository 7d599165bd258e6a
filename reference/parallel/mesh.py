"""Defines the ranks of a case and their process groups, under names that are the same on every rank.

A traced graph contains the names of its groups. The groups of a DeviceMesh have different names on different ranks, so
each group here is named by its purpose:

    fsdp    ranks that shard dense parameters among them: all ranks of a pipeline stage, or with tp > 1, those with the
            same tensor-parallel part of each layer. The group is also used for token counts
    efsdp   ranks that shard the parameters of the same experts among them
    ep      ranks that divide a set of experts among them, and exchange tokens. They need not read the same text
    tp      ranks that read the same text, and split each layer except the routed experts among them. Their results are
            summed within a layer
    pp      ranks at the same position in each stage of a pipeline. They send messages from stage to stage. It is
            torch's own group, as no graph names it

If a rewritten graph needs more groups over the same ranks, `ensure_group` makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bitproof.harness.case import Parallelism
from bitproof.harness.shared_memory import Board, SharedMemory
from bitproof.harness.torch_distributed import group_named, register_group, set_timeout, unregister_group
from bitproof.harness.within_user_code import refused
from bitproof.reference.parallel.device_order_group import DeviceOrderGroup
from bitproof.reference.parallel.rank_order_group import LoneGroup, RankOrderGroup
from bitproof.reference.parallel.reporting_group import ReportingGroup
from bitproof.reference.parallel.shared_memory_group import SharedMemoryGroup

FSDP = "fsdp"
EXPERT_FSDP = "efsdp"
EXPERT = "ep"
TENSOR = "tp"
PIPELINE = "pp"
GROUP_NAMES = (FSDP, EXPERT_FSDP, EXPERT, TENSOR)

Partition = Sequence[Sequence[int]]
Wrap = Callable[[dist.ProcessGroup], dist.ProcessGroup]

joined_groups: dict[str, dist.ProcessGroup] = {}
"""This process's groups, by name. Torch's registry has only weak references to them."""
partitions: dict[str, Partition] = {}
time_limits: list[timedelta] = []
"""The time limit of this process's collectives; empty until it has joined groups."""
_wraps: list[Wrap] = []
"""The function that wraps torch's groups so that they sum in a stated order.

It returns a group unchanged if NCCL's own sums are used.
"""
disturbances: list[Wrap] = []
"""The function with which a fault wraps every group; empty without a fault."""
shared_memories: list[SharedMemory] = []
"""The shared memory of this process's groups; empty if they do not use any."""
_in_memory: list[SharedMemoryGroup] = []
"""This process's groups that use shared memory."""
_boards: list[Board] = []
"""The board to which this process reports its collectives; empty if it does not report them."""


@dataclass(frozen=True)
class Mesh:
    """A rank's coordinates in the process groups of a case.

    Rank r has these coordinates; in a pipeline, r is its index among the ranks with the same stages:

    - `ep`: r % ep, and `efsdp`: r // ep
    - `tp`: r % tp, and `fsdp`: r // tp

    For example, with ep=2 and tp=1, rank 5 has `ep` 1, `efsdp` 2 and `fsdp` 5. Ranks with the same `fsdp` coordinate
    read the same text. `device` is the rank's device.
    """

    rank: int
    parallelism: Parallelism
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a device is immutable)

    def size(self, group: str) -> int:
        """Return the number of ranks in the group with this name."""
        return len(self.partition(group)[0])

    def coordinate(self, group: str) -> int:
        """Return this rank's index within its instance of the group."""
        return self.members(group).index(self.rank)

    def members(self, group: str) -> list[int]:
        """Return the ranks of this rank's instance of the group, in the group's order."""
        return next(ranks for ranks in self.partition(group) if self.rank in ranks)

    def partition(self, group: str) -> list[list[int]]:
        """Return a list for each instance of the group, with its ranks. Each rank is in exactly one of these lists."""
        world, ep, tp = self.parallelism.world_size, self.parallelism.ep, self.parallelism.tp
        ranks, size = range(world), self.parallelism.stage_ranks
        parts = [ranks[first : first + size] for first in range(0, world, size)]
        return {
            FSDP: [list(part[i::tp]) for part in parts for i in range(tp)],
            EXPERT_FSDP: [list(part[i::ep]) for part in parts for i in range(ep)],
            EXPERT: [list(ranks[i : i + ep]) for i in range(0, world, ep)],
            TENSOR: [list(ranks[i : i + tp]) for i in range(0, world, tp)],
            PIPELINE: [list(ranks[i::size]) for i in range(size)],
        }[group]

    def object_of(self, group: str) -> str:
        """Return the name under which the process group of the group named `group` is made.

        With `shared_groups`, names with the same ranks share a process group, which is made under the first of these
        names.
        """
        if not self.parallelism.shared_groups:
            return group
        return next(name for name in GROUP_NAMES if self.partition(name) == self.partition(group))


def join_groups(
    mesh: Mesh,
    device: torch.device,
    store: dist.Store,
    *,
    backend: str,
    timeout: float = 1800.0,
    memory: SharedMemory | None = None,
    native: bool = False,
    disturb: Wrap | None = None,
    board: Board | None = None,
) -> None:
    """Start torch.distributed on this rank, and register the mesh's groups under their names.

    - `backend`: "nccl" or "gloo". Groups sum in rank order (see `DeviceOrderGroup` and `RankOrderGroup`).
    - `timeout`: the longest wait of a collective, in seconds.
    - `memory`: shared memory for the named groups on gloo. The bits stay the same. Make it before ranks are forked.
    - `native`: True if NCCL sums in its own order.
    - `disturb`: a fault, as a function that takes each named group and returns the group to use instead.
    - `board`: a board to which the rank reports the collectives of named groups.
    """
    limit = timedelta(seconds=timeout)
    world_size = mesh.parallelism.world_size
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=mesh.rank, world_size=world_size, timeout=limit, device_id=device_id
    )
    # `ensure_group` reads these lists, so they are filled first.
    time_limits.append(limit)
    _wraps.append(RankOrderGroup if backend == "gloo" else (lambda group: group) if native else DeviceOrderGroup)
    if disturb is not None:
        disturbances.append(disturb)
    if board is not None:
        _boards.append(board)
    if memory is not None and backend == "gloo":
        memory.join(mesh.rank)
        shared_memories.append(memory)
    for name in GROUP_NAMES:
        # With shared groups, the first of the names with the same ranks makes the object, and the others register it.
        first = mesh.object_of(name)
        if first == name:
            ensure_group(name, mesh.partition(name))
        else:
            keep_group(name, mesh.partition(name), joined_groups[first], is_new=False)


def ensure_group(name: str, partition: Partition, *, high_priority: bool = False) -> None:
    """Make and register a group over each list of ranks in `partition`, unless the group exists.

    All ranks must call this, for the same groups in the same order. On NCCL, `high_priority` applies to the group's
    stream. Raises ValueError if the group exists with other ranks, or if the ranks of a list do not ascend.
    """
    partition = [list(ranks) for ranks in partition]
    if name in joined_groups:
        if partitions[name] != partition:
            raise refused(ValueError(f"group {name} exists, over {partitions[name]}, not {partition}"))
        return
    if any(ranks != sorted(ranks) for ranks in partition):
        raise refused(ValueError(f"group {name} lists ranks out of order: {partition}"))
    is_alone = all(len(ranks) == 1 for ranks in partition)
    group = LoneGroup() if is_alone else _order_sums(_make_part(partition, high_priority), partition)
    keep_group(name, partition, group)


def pipeline_group(mesh: Mesh) -> dist.ProcessGroup:
    """Make torch's own group of the ranks in this rank's pipeline. All ranks must call this together.

    It is for messages between two ranks, which the other groups in this file do not support.
    """
    return _make_part(mesh.partition(PIPELINE), False)


def _make_part(partition: Partition, high_priority: bool) -> dist.ProcessGroup:
    """Make torch's group over this rank's list in `partition`. All ranks must call this together."""
    rank = dist.get_rank()
    own = next(list(ranks) for ranks in partition if rank in ranks)
    # NCCL splits the communicator of all ranks once for the whole partition.
    if dist.get_backend() != "gloo":
        options: Any = None
        if high_priority:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            set_timeout(options, time_limits[0])
        parts = [list(ranks) for ranks in partition]
        part = dist.split_group(split_ranks=parts, timeout=time_limits[0], pg_options=options)
        assert part is not None, "each rank is in a part"
        return part
    # With gloo, only the ranks of a part make its group. torch puts the number of groups that a rank has made into the
    # next group's name, so this number must be equal on the group's ranks. If parts differ in size, ranks would make
    # different numbers of groups later, so all ranks make the groups of all parts.
    if len({len(ranks) for ranks in partition}) == 1:
        return dist.new_group(own, timeout=time_limits[0], use_local_synchronization=True)
    groups = {tuple(ranks): dist.new_group(list(ranks), timeout=time_limits[0]) for ranks in partition}
    return groups[tuple(own)]


def _order_sums(group: dist.ProcessGroup, partition: Partition) -> dist.ProcessGroup:
    """Return a group that sums in a stated order: in shared memory if enough of it is left, otherwise over `group`."""
    # gloo's group is made in both cases. Its idle threads cost almost nothing, but without them steps on a busy machine
    # take up to three times as long (docs/explanation/decisions/shared-memory.md).
    rings = (
        shared_memories[0].next_area(partition, dist.get_rank(), time_limits[0].total_seconds())
        if shared_memories
        else None
    )
    if rings is None:
        return _wraps[0](group)
    _in_memory.append(SharedMemoryGroup(group, rings))
    return _in_memory[-1]


def collectives_in_memory() -> dict[str, int]:
    """Return name -> number of collectives that this rank has launched, for each shared-memory group of several ranks.

    The names are "shared memory 0", "shared memory 1", and so on.
    """
    groups = [group for group in _in_memory if group.num_ranks > 1]
    return {f"shared memory {index}": group.inline.posted for index, group in enumerate(groups)}


def ranks_in(name: str) -> tuple[int, ...] | None:
    """Return the ranks of this rank's instance of a group, in the group's order; None for an unknown name.

    `name` may also name a group of torch's own.
    """
    if name in partitions:
        rank = dist.get_rank()
        return next((tuple(ranks) for ranks in partitions[name] if rank in ranks), None)
    try:
        return tuple(dist.get_process_group_ranks(group_named(name)))
    except (RuntimeError, ValueError, KeyError):
        return None


def leave_groups() -> None:
    """Undo `join_groups` and `ensure_group`. Does nothing if this rank has not joined."""
    if not dist.is_initialized():
        return
    for name in joined_groups:
        unregister_group(name)
    for registry in (
        joined_groups,
        partitions,
        time_limits,
        _wraps,
        disturbances,
        shared_memories,
        _in_memory,
        _boards,
    ):
        registry.clear()
    dist.destroy_process_group()


def keep_group(name: str, partition: Partition, group: dist.ProcessGroup, *, is_new: bool = True) -> None:
    """Register a group under a name.

    With `is_new`, the group is first wrapped by the `disturb` and the `board` that `join_groups` got.
    """
    for disturb in disturbances if is_new else ():
        group = disturb(group)
    # Reports go around a fault, so that a collective which a fault delays is reported, too.
    for board in _boards if is_new else ():
        group = ReportingGroup(group, name, functools.partial(board.write, dist.get_rank()))
    joined_groups[name], partitions[name] = group, partition
    register_group(name, group)
