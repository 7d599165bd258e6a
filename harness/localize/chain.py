"""The chain of calls that leads from the one to blame to the record that is shown: each reads what the one before gave.

1. The way is the shortest one, of those that pass by values which differ where there is such a way.
2. It crosses from rank to rank at collectives alone.
3. Views are left out, and of the rest at most `MAX_LINKS` are told: first those that change the rank or the module.
4. What a call changed is how its output differs from that of the other side's call of the same turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site

MAX_LINKS = 10

UNTIMELY = "update", "backward"


class Link(NamedTuple):
    """A call of a chain, on its rank, and how many were left out before it.

    `reference` and `candidate` are its indices in the two sides' logs; None where a side has no call of its turn.
    """

    call: Call
    rank: int
    left_out: int
    reference: int | None = None
    candidate: int | None = None


def way_between(
    first: Site,
    lasts: Iterable[Site],
    joined: JoinedLogs,
    givers: Callable[[Site], Iterable[int]],
    differs: Callable[[Site], bool],
) -> list[Site]:
    """The calls from `first` to one of `lasts`; empty where no path of values leads there."""
    for passes in (differs, lambda _: True):
        after: dict[Site, Site | None] = dict.fromkeys(lasts)
        pending = deque(after)
        while pending and first not in after:
            site = pending.popleft()
            for peer in joined.together(site):
                if peer not in after:
                    after[peer] = site
                for giver in givers(peer):
                    if (peer[0], giver) not in after and ((peer[0], giver) == first or passes((peer[0], giver))):
                        after[peer[0], giver] = peer
                        pending.append((peer[0], giver))
        if first in after:
            return list(_followed(first, after))
    return []


def _followed(site: Site, after: dict[Site, Site | None]) -> Iterable[Site]:
    current: Site | None = site
    while current is not None:
        yield current
        current = after[current]


def place_on(way: Sequence[Site], logs: Sequence[Sequence[Call]], place: Place) -> Place:
    """The place of a way's first call: one that seems to be of the update and that backward still reads is of backward.

    So is what changes gradients between micro-batches, and what a stage of a pipeline sends back to the one before.
    """
    calls = [logs[rank][index] for rank, index in way]
    later = (call.place.direction for call in calls if not call.collective and call.place.direction != "update")
    return place._replace(direction="backward") if (place.direction, next(later, None)) == UNTIMELY else place


def links_of(
    way: Sequence[Site], logs: Sequence[Sequence[Call]], sides: Callable[[Site], tuple[int | None, int | None]]
) -> list[Link]:
    """What is told of a way: at most `MAX_LINKS` calls. `sides` has a call's indices in both sides' logs."""
    kept = [i for i, (rank, index) in enumerate(way) if i in (0, len(way) - 1) or not logs[rank][index].view]
    if len(kept) > MAX_LINKS:
        kept = sorted(_most_telling(kept, way, logs))
    calls = [logs[rank][index] for rank, index in way]
    placed = [call._replace(place=place_on(way[i:], logs, call.place)) for i, call in enumerate(calls)]
    return [
        Link(placed[i], way[i][0], i - previous - 1, *sides(way[i]))
        for previous, i in zip([-1, *kept], kept, strict=False)
    ]


def _most_telling(kept: Sequence[int], way: Sequence[Site], logs: Sequence[Sequence[Call]]) -> Collection[int]:
    """The ends, then what changes rank, then what changes module or direction, from the culprit on."""

    def is_elsewhere(i: int) -> int:
        (rank, index), (before, earlier) = way[i], way[i - 1]
        places = [logs[r][at].place[:2] for r, at in ((rank, index), (before, earlier))]
        return 0 if rank != before else 1 if places[0] != places[1] else 2

    between = sorted(kept[1:-1], key=lambda i: (is_elsewhere(i), i))
    return [kept[0], kept[-1], *between[: MAX_LINKS - 2]]
