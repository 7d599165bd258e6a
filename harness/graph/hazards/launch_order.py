"""Checks the order in which ranks launch collectives, and finds possible deadlocks.

Ranks that run the same graph launch the same collectives in the same order, and so cannot deadlock, under three
conditions:

1. Every collective names an existing group, and each rank belongs to exactly one instance of the group.
2. If the call has the group's size or split sizes as arguments, these fit the group's number of ranks.
3. All ranks reach the collective: it is not in a branch that depends on data.

If ranks run different graphs, `harness.operators.crossings` compares their orders.

Not covered: if GPUs run collectives of two groups in different orders, these may starve each other of a GPU's
resources. A setting of NCCL prevents that (`harness/machine/nccl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.groups import Partition
from bitproof.harness.graph.hazards.walk import LaunchEntry
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.operators import named
from bitproof.harness.operators.crossings import Deadlock, QueueEntry
from bitproof.harness.step.effects import PeerMessage
from bitproof.harness.step.step_program import LocatedCall
from bitproof.harness.torch_compat import OpOverloadPacket
from bitproof.harness.torch_operators import overload_of

_SIZES = ("group_size",)


def name_of_call(call: LocatedCall) -> str:
    """Return a call's operator, module and direction, such as `aten.mm.default in layers.0 (forward)`."""
    origin = origin_of(call.node)
    target, _ = operators.called(call.node)
    if (packet := getattr(target, "overloadpacket", None)) is not None:
        name = f"{packet}.{overload_of(target)}"
    else:
        name = str(target) if isinstance(target, OpOverloadPacket) else operators.name_of(target)
    return f"{name} in {origin}{call.where}"


# Proof for the conditions at the top: consider the first collective that some rank has not reached. It is the next
# collective for each such rank, so all ranks of its group reach it.
def find_order_problems(entries: Sequence[LaunchEntry], groups: Mapping[str, Partition] | None) -> list[Deadlock]:
    """Return the collectives that some rank may never reach, if all ranks run the same graph: these are possible
    deadlocks.

    `entries` has the graph's launches and waits. `groups` maps each group's name to its instances, each a tuple of
    ranks; with None, calls are not compared with groups.
    """
    found = []
    for entry in entries:
        if entry.waits is not None:
            continue
        group, who = operators.group_name(entry.call.node), f"`{entry.call}` ({name_of_call(entry.call)})"
        if not group:
            why = f"{who} runs in a process group without a known name: its order is compared with no other rank's"
            found.append(Deadlock(str(entry.call), why))
            continue
        if entry.choice is not None:
            why = f"{who} runs where `{entry.choice}` chooses it by data, which may differ between ranks"
            found.append(Deadlock(str(entry.call), why))
        if (message := entry.call.message) is not None and not isinstance(message.peer, int):
            why = f"{who} is a message whose other rank the graph does not state: it is matched with no rank's"
            found.append(Deadlock(str(entry.call), why))
        if groups is None:
            continue
        if group not in groups:
            found.append(Deadlock(str(entry.call), f"{who} names the group {group}, which no rank has"))
            continue
        found += [Deadlock(str(entry.call), f"{who} {why}") for why in _misfits(entry.call, group, groups)]
    return found


def _misfits(call: LocatedCall, group: str, groups: Mapping[str, Partition]) -> list[str]:
    """Return the ways in which a call contradicts its group, such as `counts 4 ranks in the group ep, which has 2`."""
    found, partition = [], groups[group]
    ranks = [rank for part in partition for rank in part]
    if len(set(ranks)) != len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        found.append(f"names the group {group}, to which rank {twice[0]} belongs twice")
    if missing := sorted({rank for parts in groups.values() for part in parts for rank in part} - {*ranks}):
        found.append(f"names the group {group}, to which rank {missing[0]} does not belong")
    if (message := call.message) is not None and isinstance(message.peer, int):
        # Within the group, ranks are numbered from 0, and the number must exist in each instance.
        known = range(min(map(len, partition))) if _counts_in_group(call) else ranks
        if message.peer not in known:
            found.append(f"names rank {message.peer} as the other end of a message, which is not in the group {group}")
    given = operators.arguments_of(call.node)
    sizes = {len(part) for part in partition}
    for name in _SIZES:
        if isinstance(size := given.get(name), int) and sizes != {size}:
            found.append(f"counts {size} ranks in the group {group}, which has {_either(sizes)}")
    for name in ("output_split_sizes", "input_split_sizes"):
        if isinstance(splits := given.get(name), (list, tuple)) and splits and sizes != {len(splits)}:
            found.append(f"splits its rows for {len(splits)} ranks of the group {group}, which has {_either(sizes)}")
    return found


def _either(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes)))


RanksIn = Callable[[str], tuple[int, ...] | None]


def queue_entries(entries: Sequence[LaunchEntry], ranks_in: RanksIn, rank: int | None = None) -> list[QueueEntry]:
    """Convert a rank's launches and waits to data that can be compared with the data of other ranks.

    - `ranks_in`: maps a group's name to the ranks in this rank's instance of the group. It returns None for an unknown
      group, and the calls of that group are left out.
    - `rank`: the rank's number. With None, messages between two single ranks are left out.

    Messages are also left out if the graph does not state the other rank as a number.
    """
    found: list[QueueEntry] = []
    # By launch, its index in the result: a wait refers to it.
    launched: dict[LocatedCall, int] = {}
    joined: Node | None = None  # the call whose messages follow
    for entry in entries:
        group = own_group = operators.group_name(entry.call.node)
        ranks = ranks_in(group)
        text = name_of_call(entry.call)
        operator, takes = text.partition(" in ")[0], _type_of_input(entry.call)
        message = entry.call.message
        if ranks is not None and message is not None:
            ends = None if rank is None else _ends(entry.call, message, rank, ranks)
            # Messages match by their two ranks, as if each direction between two ranks were a group of its own.
            ranks = ends
            if ends is not None:
                group, operator = f"{group}, from rank {ends[0]} to rank {ends[1]}", "message"
                takes = f"tag {message.tag}, {_type_of(message.tensor.meta.get('val'))}"
        if ranks is None:
            continue
        # Messages of one call (a batch) start together, so none of them waits for the one before it.
        is_joined = entry.waits is None and message is not None and entry.call.node is joined
        joined = entry.call.node if entry.waits is None and message is not None else None
        if entry.waits is None:
            launched[entry.call] = len(found)
        name = f"`{entry.waits or entry.call}`"
        waits_for = launched.get(entry.call) if entry.waits is not None else None
        # A wait reads no input that other ranks' calls would have to match.
        if entry.waits is not None:
            takes = ""
        found.append(QueueEntry(operator, group, ranks, f"{name} ({text})", waits_for, takes, own_group, is_joined))
    return found


def _ends(call: LocatedCall, message: PeerMessage, rank: int, ranks: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the two ranks of a message, as (sender, receiver).

    Returns None if the graph does not state the other rank as a number, or if that number is not in the group. `rank`
    is this rank, and `ranks` are the ranks of the group.
    """
    peer, is_own = message.peer, _counts_in_group(call)
    if not isinstance(peer, int) or (is_own and not 0 <= peer < len(ranks)):
        return None
    peer = ranks[peer] if is_own else peer
    return (rank, peer) if message.is_sent else (peer, rank)


def _counts_in_group(call: LocatedCall) -> bool:
    # torch's own operators number ranks within the group, functional operators within the whole run.
    return getattr(operators.called(call.node)[0], "namespace", None) == "c10d"


def _type_of_input(call: LocatedCall) -> str:
    """Return the dtype and sizes of a collective's input, such as `float32[8, 4]`, to compare ranks.

    Return only the dtype if ranks may have different sizes, as for an all-to-all; "" if the input is unknown.
    """
    values = [x.meta.get("val") for x in call.node.all_input_nodes]
    value = next((x for x in values if isinstance(x, Tensor)), None)
    if value is None:
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    is_fixed = not named(operators.operator_name(call.node)).exchanges and all(isinstance(n, int) for n in value.shape)
    return f"{dtype}{[*value.shape]}" if is_fixed else dtype


def _type_of(value: object) -> str:
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
