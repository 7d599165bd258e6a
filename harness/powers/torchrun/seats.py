"""Assigns to each rank of a launcher, such as torchrun, the rank's number on its machine, and a GPU.

For this, each rank reports to rank 0 its machine and the GPUs that it sees.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bitproof.harness.capture.rank_fingerprint import describe_ranks
from bitproof.harness.errors import CaseError
from bitproof.harness.machine.devices import Placement, place
from bitproof.harness.options import CollectivesRequest

_UUIDS = ("GPU-", "MIG-")


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """A rank's machine, and the GPUs that the rank sees there.

    - `machine`: name of the machine.
    - `node`: the machine, and the launcher's agent on it. Each agent numbers its ranks from 0.
    - `local_rank`: the rank's LOCAL_RANK; None if the launcher set none.
    - `gpus`: the GPUs in order, each named by its UUID, or by its number on the machine.
    """

    machine: str
    node: str
    local_rank: int | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's number on its node, the number of ranks on this node, and the rank's GPU.

    A node is a machine, or a part of it whose ranks torchrun numbers from 0.

    - `gpu`: index into the GPUs that this rank sees, or None.
    - `name`: name of the GPU. Two ranks with the same name share a GPU.
    """

    machine: str = ""
    local_rank: int
    local_world_size: int
    gpu: int | None = None
    name: str = ""


def own_machine() -> str:
    """Return a name for this machine, which is the same in all its processes. Host names are not unique: two may be
    `localhost`.
    """
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}".strip()


def own_local_rank(environment: Mapping[str, str]) -> int | None:
    text = environment.get("LOCAL_RANK", "")
    return int(text) if text.isascii() and text.isdigit() else None


def assign_seats(ranks: Sequence[Whereabouts]) -> list[Seat]:
    """Return each rank's seat: its number on its node (local rank), and its GPU.

    - The local ranks are those that the launcher set, if they are 0, 1, 2, ... on a node. Otherwise a node's ranks are
      numbered in order.
    - Ranks that see the same GPUs on a machine get different ones in turn. A rank that shares its view of GPUs with no
      other rank gets index 0.

    Example: ranks 0 and 1 are on one machine, rank 2 on another, and each sees four GPUs. The launcher set no numbers.
    The local ranks are 0, 1, 0, and the GPUs are 0, 1, 0.
    """
    on_node = _numbers([(rank.machine, rank.node) for rank in ranks], ranks)
    # Ranks that see the same GPUs on a machine share them out, whichever agents started the ranks.
    at_gpus = _numbers([(rank.machine, rank.gpus) for rank in ranks], ranks)
    seats = []
    for rank, (local_rank, count), (number, _) in zip(ranks, on_node, at_gpus, strict=True):
        own = Seat(machine=rank.machine, local_rank=local_rank, local_world_size=count)
        if rank.gpus:
            # If ranks outnumber the GPUs, GPUs repeat; `_gpu_shortage` refuses that unless sharing is allowed.
            index = number % len(rank.gpus)
            name = rank.gpus[index]
            name = name if name.startswith(_UUIDS) else f"GPU {name} of {rank.machine}"
            own = replace(own, gpu=index, name=name)
        seats.append(own)
    return seats


def _numbers(groups: Sequence[Hashable], ranks: Sequence[Whereabouts]) -> list[tuple[int, int]]:
    by_group: dict[Hashable, list[int]] = defaultdict(list)
    for rank, group in enumerate(groups):
        by_group[group].append(rank)
    numbers = {}
    for members in by_group.values():
        by_local_rank = {ranks[rank].local_rank: rank for rank in members}
        # Only if they are 0, 1, 2, ...: a number may be missing, or two ranks may have the same one.
        if by_local_rank.keys() == set(range(len(members))):
            members = [by_local_rank[number] for number in range(len(members))]
        numbers.update({rank: (number, len(members)) for number, rank in enumerate(members)})
    return [numbers[rank] for rank in range(len(ranks))]


def place_seats(
    request: str, seats: Sequence[Seat], collectives: CollectivesRequest | None, *, share_gpus: bool = False
) -> tuple[Placement, str | None]:
    """Return a pair: the devices of a case on a launcher's ranks, and why `auto` did not choose the visible GPUs (or
    None).

    Raises CaseError like `machine.devices.place`, and for `cuda` if ranks have no GPU, or share a GPU without
    `share_gpus`.
    """
    names = {seat.name for seat in seats if seat.name}
    lack = _gpu_shortage(seats) if names and request != "cpu" else None
    is_shared = request == "cuda" and share_gpus and all(seat.name for seat in seats)
    if lack is not None and request == "cuda" and not is_shared:
        raise lack
    # With `auto`, GPUs that do not suffice are not used at all.
    num_gpus = 0 if lack is not None and not is_shared else len(names)
    placement = place(request, len(seats), num_gpus, collectives, share_gpus=share_gpus)
    if placement.device == "cuda":
        placement = replace(placement, num_gpus=1 + max(seat.gpu or 0 for seat in seats))
    return placement, lack.what if lack is not None and placement.device == "cpu" else None


def _gpu_shortage(seats: Sequence[Seat]) -> CaseError | None:
    by_name: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(seats):
        by_name[each.name].append(rank)
    # A seat without a GPU has an empty name.
    blind = by_name.pop("", [])
    if blind:
        return CaseError(
            f"{describe_ranks(blind)} of {len(seats)} see no GPU",
            expected="at least 1 GPU that torch can use in the process of each rank",
            found=f"{len(by_name)} GPUs in all",
            fix="run `bitproof doctor` there, look at CUDA_VISIBLE_DEVICES and the launcher's --gpus options, "
            "or run with --device cpu",
        )
    shared = {name: ranks for name, ranks in by_name.items() if len(ranks) > 1}
    if not shared:
        return None
    name, ranks = next(iter(shared.items()))
    return CaseError(
        f"{describe_ranks(ranks)} would use one GPU, and NCCL gives each rank one of its own",
        expected=f"{len(seats)} GPUs for {len(seats)} ranks",
        found=f"{len(by_name)} GPUs; {describe_ranks(ranks)}: {name}",
        fix="start as many ranks on a machine as it has GPUs, show each rank other GPUs (CUDA_VISIBLE_DEVICES), "
        "or let ranks share them over gloo, which tests no NCCL: --share-gpus",
    )
