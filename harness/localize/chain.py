"""The chain of calls from the blamed call to the reported record: each reads the output of the previous call.

1. It is a shortest path through values that differ or, if there is none, through any values.
2. It goes from rank to rank only at collectives.
3. Views are left out, and at most `MAX_LINKS` of the other calls are shown. Calls on another rank or in another module
   than the call before take precedence.
4. Each call is compared with its matching call in the other system.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from bitproof.harness.localize.culprit import Culprit, Link
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import CallId, JoinedLogs

MAX_LINKS = 10

UNTIMELY = "update", "backward"

Pair = tuple[str, str]
"""The digests of a tensor that differs: the reference's and the candidate's."""


def with_chain(
    culprit: Culprit, rank: int, pair: Pair, logs: Sequence[CandidateLog], mine: JoinedLogs, known: JoinedLogs
) -> Culprit:
    """Return `culprit` with its field `chain` set: the calls that lead from the blamed call to a record.

    `pair` has the record's two digests. `mine` has the candidate's logs, and `known` the reference's. If the blamed
    call is missing, the chain has the reference's calls.
    """
    # The candidate has no missing call, so the path is searched in the reference's logs, through
    # values that are missing.
    is_missing = culprit.candidate is None
    joined, value = (known, pair[0]) if is_missing else (mine, pair[1])
    producers = [log.reference.producers if is_missing else log.producers for log in logs]
    differs = [log.lacks if is_missing else log.differs for log in logs]
    # Several calls may have the record's value, for example a view and the call behind it: the nearest is used.
    lasts = [(rank, i) for i, call in enumerate(joined.logs[rank]) if value in (*call.outputs, *call.aliases)]
    first = culprit.rank, culprit.index
    way = way_between(first, lasts, joined, lambda x: producers[x[0]](x[1]), lambda x: differs[x[0]](x[1]))

    def sides(site: CallId) -> tuple[int | None, int | None]:
        if site == first:
            return culprit.reference, culprit.candidate
        log, index = logs[site[0]], site[1]
        other = log.matching_here(index) if is_missing else log.matching_call(index)
        return (index, other) if is_missing else (other, index)

    # The path shows what the culprit's output is for, which may correct the direction that the log has.
    call = culprit.call._replace(place=place_on(way, joined.logs, culprit.call.place))
    return replace(culprit, call=call, explains=(rank, *pair), chain=tuple(links_of(way, joined.logs, sides)))


def way_between(
    first: CallId,
    lasts: Iterable[CallId],
    joined: JoinedLogs,
    producers: Callable[[CallId], Iterable[int]],
    differs: Callable[[CallId], bool],
) -> list[CallId]:
    """Return the calls on a shortest path from `first` to one of `lasts`, both included; empty if there is none.

    Each call reads an output of the previous call, or belongs to the same collective. Differing calls are preferred.
    """
    # Breadth first, backwards from the record, so the first path found is a shortest one.
    for passes in (differs, lambda _: True):
        after: dict[CallId, CallId | None] = dict.fromkeys(lasts)
        pending = deque(after)
        while pending and first not in after:
            site = pending.popleft()
            # A collective's result depends on the calls of all its ranks, so the path may go on from any of them.
            for peer in joined.together(site):
                if peer not in after:
                    after[peer] = site
                for producer in producers(peer):
                    if (peer[0], producer) not in after and (
                        (peer[0], producer) == first or passes((peer[0], producer))
                    ):
                        after[peer[0], producer] = peer
                        pending.append((peer[0], producer))
        if first in after:
            return list(_path_from(first, after))
    return []


def _path_from(site: CallId, after: dict[CallId, CallId | None]) -> Iterable[CallId]:
    current: CallId | None = site
    while current is not None:
        yield current
        current = after[current]


def place_on(way: Sequence[CallId], logs: Sequence[Sequence[Call]], place: CallSite) -> CallSite:
    """Return `place`, with its direction changed from "update" to "backward" if the path `way` continues in backward.

    By default, calls outside autograd get the direction "update". This is wrong for a call that scales gradients
    between micro-batches: a later backward reads its result.
    """
    calls = [logs[rank][index] for rank, index in way]
    later = (call.place.direction for call in calls if not call.collective and call.place.direction != "update")
    return place._replace(direction="backward") if (place.direction, next(later, None)) == UNTIMELY else place


def links_of(
    way: Sequence[CallId], logs: Sequence[Sequence[Call]], sides: Callable[[CallId], tuple[int | None, int | None]]
) -> list[Link]:
    """Return a link for each call of the path `way` that a report shows, at most `MAX_LINKS`.

    `sides` returns a pair of indices of a call: in the reference's log, and in the candidate's log. An index is None if
    that system does not make the call.
    """
    kept = [i for i, (rank, index) in enumerate(way) if i in (0, len(way) - 1) or not logs[rank][index].view]
    if len(kept) > MAX_LINKS:
        # The choice is by importance; the chain is in the order of the path.
        kept = sorted(_most_informative(kept, way, logs))
    calls = [logs[rank][index] for rank, index in way]
    placed = [call._replace(place=place_on(way[i:], logs, call.place)) for i, call in enumerate(calls)]
    # The numbers of left-out calls are the gaps between the kept positions; -1 stands for a position before the first.
    return [
        Link(placed[i], way[i][0], i - previous - 1, *sides(way[i]))
        for previous, i in zip([-1, *kept], kept, strict=False)
    ]


def _most_informative(kept: Sequence[int], way: Sequence[CallId], logs: Sequence[Sequence[Call]]) -> Collection[int]:
    """Return `MAX_LINKS` of the positions `kept` in the path `way`: those that a report shows.

    The first two and the last are always shown. Among the others, calls on another rank than the call before take
    precedence, then calls in another module or direction.
    """

    def is_elsewhere(i: int) -> int:
        (rank, index), (before, earlier) = way[i], way[i - 1]
        places = [logs[r][at].place[:2] for r, at in ((rank, index), (before, earlier))]
        # 0: another rank, 1: another module or direction, 2: neither. Chunks, the third field of a place, do not count.
        return 0 if rank != before else 1 if places[0] != places[1] else 2

    between = sorted(kept[2:-1], key=lambda i: (is_elsewhere(i), i))
    return [*kept[:2], kept[-1], *between[: MAX_LINKS - 3]]
