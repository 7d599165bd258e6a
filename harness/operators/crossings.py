"""Find deadlocks: simulate the collectives of all ranks until no rank can continue. Imports no torch.

A launch is a call that starts a collective or a message without waiting for its end. On NCCL:

- Each launch runs on a communicator. A group has a communicator for collectives and another for batches of messages. If
  the group was initialized eagerly, it has a third for single messages.
- The launches of a communicator run in sequence on each rank. Messages of a batch run together.
- A launch ends when all ranks of its group have begun it.
- Work that a stream gets after a wait, including launches, runs after the wait has ended.

For example, rank 0 waits for A before it launches B, and rank 1 waits for B before it launches A: a deadlock.

Gloo is simulated in the same way, because a graph must be correct on NCCL, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deadlock:
    """A possible deadlock between ranks: the call at which a rank stops, and the reason."""

    call: str
    why: str

    def __str__(self) -> str:
        return f"ranks may wait for each other for ever: {self.why}"


@dataclass(frozen=True)
class QueueEntry:
    """A launch of a collective or message by a rank, or a wait for a launch.

    - `operator`, `name`: the operator and the name of the call.
    - `group`, `ranks`: the name and the ranks of the call's process group.
    - `waits_for`: for a wait, the index of the awaited launch in the rank's sequence; None for a launch.
    - `takes`: the dtype and sizes of the input, which must be equal on all ranks; "" if unknown.
    - `communicator`: the name of the communicator; "" for the group's communicator for collectives.
    - `is_joined`: whether this launch belongs to the same batch of messages as the launch before it.
    """

    operator: str
    group: str
    ranks: tuple[int, ...]
    name: str
    waits_for: int | None = None
    takes: str = ""
    communicator: str = ""
    is_joined: bool = False

    @property
    def queue(self) -> str:
        """A name for the communicator. Launches with the same name run in sequence on a rank."""
        return self.communicator or self.group


@dataclass
class _Rank:
    """The progress of a rank in the simulation. A launch is identified by its index in `entries`.

    - `entries`: the launches and waits of the rank, in order.
    - `place`: the index in `entries` of the next launch or wait.
    - `launched`: maps a group to its launches so far.
    - `nth`: maps a launch to its index in the list of its group in `launched`.
    - `calls`: maps a communicator to its calls so far. A call is a list of launches that run together.
    - `call`: maps a launch to the index of its call in `calls`.
    - `ended`: maps a communicator to the number of its calls that have ended.
    """

    entries: Sequence[QueueEntry]
    place: int = 0
    launched: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[str, list[list[int]]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    nth: dict[int, int] = field(default_factory=dict)
    call: dict[int, int] = field(default_factory=dict)

    def launch(self) -> None:
        entry, index = self.entries[self.place], self.place
        own, calls = self.launched.setdefault(entry.group, []), self.calls.setdefault(entry.queue, [])
        self.nth[index] = len(own)
        own.append(index)
        # Messages of one batch are one call of the queue: they begin and end together.
        calls[-1].append(index) if entry.is_joined else calls.append([index])
        self.call[index] = len(calls) - 1

    def has_ended(self, index: int) -> bool:
        return self.call[index] < self.ended.get(self.entries[index].queue, 0)

    def has_begun(self, index: int) -> bool:
        return self.call[index] <= self.ended.get(self.entries[index].queue, 0)

    def first_of(self, queue: str) -> QueueEntry:
        """Return the first launch of a communicator that has not ended. All later launches wait for it."""
        return self.entries[self.calls[queue][self.ended.get(queue, 0)][0]]


def find_deadlocks(entries_of: Mapping[int, Sequence[QueueEntry]]) -> list[Deadlock]:
    """Return the possible deadlocks between ranks, given each rank's launches and waits in order.

    Launches that match, but are not the same call on all ranks, are returned as deadlocks, too.
    """
    ranks = {rank: _Rank(entries) for rank, entries in entries_of.items()}
    # A list and no generator: every rank advances in each round.
    while any([_advance(rank, ranks) for rank in ranks]):
        pass
    # Nothing moves any more. What is left is a deadlock: a rank that waits for a launch which another rank never
    # makes, or a launch behind an unfinished one in its queue.
    held_up = [found for rank in ranks for found in _behind_a_stuck_launch(rank, ranks)]
    left = {rank: own.entries[own.place] for rank, own in ranks.items() if own.place < len(own.entries)}
    stuck = [_stuck_rank(rank, entry, ranks) for rank, entry in left.items() if not _is_launched(rank, entry, ranks)]
    return [*stuck, *held_up, *_mismatches(ranks)]


def _advance(rank: int, ranks: Mapping[int, _Rank]) -> bool:
    """Let a rank go on until it must wait, and end its launches that can end. Return whether anything changed."""
    own, has_moved = ranks[rank], False
    # First everything that the host does without waiting, then the ends of launches, which may free the next wait.
    while own.place < len(own.entries):
        waits_for = own.entries[own.place].waits_for
        if waits_for is None:
            own.launch()
        elif not own.has_ended(waits_for):
            break
        own.place += 1
        has_moved = True
    for queue, calls in own.calls.items():
        # Only the first unfinished call of a queue may end: a communicator runs its calls in sequence.
        while (n := own.ended.get(queue, 0)) < len(calls) and all(_can_end(rank, index, ranks) for index in calls[n]):
            own.ended[queue] = n + 1
            has_moved = True
    return has_moved


def _matching_launches(rank: int, index: int, ranks: Mapping[int, _Rank]) -> dict[int, int | None]:
    """Return a dict: each rank of a launch's group -> the index of its matching launch; None if it has none yet.

    Launches match if each is the n-th of the group on its rank.
    """
    own = ranks[rank]
    entry, nth = own.entries[index], own.nth[index]
    # Ranks whose graphs were not given are taken to take part.
    theirs = {member: ranks[member].launched.get(entry.group, []) for member in entry.ranks if member in ranks}
    return {member: found[nth] if len(found) > nth else None for member, found in theirs.items()}


def _can_end(rank: int, index: int, ranks: Mapping[int, _Rank]) -> bool:
    met = _matching_launches(rank, index, ranks)
    return all(their is not None and ranks[member].has_begun(their) for member, their in met.items())


def _is_launched(rank: int, entry: QueueEntry, ranks: Mapping[int, _Rank]) -> bool:
    # A wait for a launch that all ranks have made is not stuck by itself: `_behind_a_stuck_launch` finds the cause.
    return entry.waits_for is not None and None not in _matching_launches(rank, entry.waits_for, ranks).values()


def _behind_a_stuck_launch(rank: int, ranks: Mapping[int, _Rank]) -> list[Deadlock]:
    """Return the deadlocks in which a launch that `rank` has begun cannot begin on another rank.

    On the other rank, the matching launch waits for a launch of the same communicator that never ends.
    """
    found, own = [], ranks[rank]
    for queue, calls in own.calls.items():
        for index in calls[own.ended.get(queue, 0)] if own.ended.get(queue, 0) < len(calls) else ():
            for member, their in _matching_launches(rank, index, ranks).items():
                # A launch that is missing entirely is reported by `_stuck_rank` or `_mismatches`.
                if their is None or ranks[member].has_begun(their):
                    continue
                entry, other = own.entries[index], ranks[member].entries[their]
                first = ranks[member].first_of(other.queue).name
                why = f"rank {rank} is in {entry.name}, which rank {member} launches as {other.name} behind {first}"
                found.append(
                    Deadlock(entry.name, f"{why}; on NCCL group {queue} runs its launches one after the other")
                )
                break
    return found


def _stuck_rank(rank: int, entry: QueueEntry, ranks: Mapping[int, _Rank]) -> Deadlock:
    counts = {member: len(ranks[member].launched.get(entry.group, ())) for member in entry.ranks if member in ranks}
    # The rank that launched least in the group is the one to wait for.
    behind = min(counts, key=lambda member: counts[member])
    why = f"rank {rank} waits in {entry.name} for rank {behind}, which has launched {counts[behind]} in group"
    return Deadlock(entry.name, f"{why} {entry.group} and not the one that it waits for")


def _mismatches(ranks: Mapping[int, _Rank]) -> list[Deadlock]:
    """Return the launches that match but are different calls, or that some ranks of the group do not make.

    Launches match if each is the n-th of the group on its rank.
    """
    found = []
    launched = {
        rank: {group: [own.entries[index] for index in found] for group, found in own.launched.items()}
        for rank, own in ranks.items()
    }
    for rank, by_group in launched.items():
        for group, entries in by_group.items():
            for other in entries[0].ranks:
                # Each pair of ranks once.
                if other <= rank or other not in launched:
                    continue
                theirs = launched[other].get(group, ())
                # The same calls in another order: two all-reduces of equal shape match by operator and shape, but not
                # by name, and each would get the values of the other.
                is_swapped = sorted(x.name for x in entries) == sorted(x.name for x in theirs)
                for mine, their in zip(entries, theirs, strict=False):
                    if not _are_same_call(mine, their) or (is_swapped and mine.name != their.name):
                        why = f"rank {rank} launches {_describe(mine)} where rank {other} launches {_describe(their)}"
                        found.append(Deadlock(mine.name, f"{why}, in group {group}"))
                        break
                else:
                    # All launches that both ranks make match, so only their number may differ.
                    if len(entries) != len(theirs):
                        why = f"rank {rank} launches {len(entries)} collectives of group {group}, rank {other}"
                        found.append(Deadlock(entries[0].name, f"{why} {len(theirs)}"))
    return found


def _are_same_call(mine: QueueEntry, their: QueueEntry) -> bool:
    # A launch whose dtype and sizes are unknown matches any.
    return mine.operator == their.operator and (not mine.takes or not their.takes or mine.takes == their.takes)


def _describe(entry: QueueEntry) -> str:
    return f"{entry.name}, of {entry.takes}" if entry.takes else entry.name
