"""The roots of what differs: wrong calls on a path of values to it that read nothing wrong. See rule 1 of `blame`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.collective_inputs import fed_wrong
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site


class Roots(NamedTuple):
    """The roots, and by wrong call on a path, what gave it something wrong to read, or the roots that it ends in."""

    found: set[Site]
    givers: Mapping[Site, set[Site]]


def roots_of(
    differing: Mapping[int, Iterable[Pair]], logs: Sequence[CandidateLog], joined: JoinedLogs, known: JoinedLogs
) -> Roots:
    """Walk back from the tensors that differ over wrong calls, at a collective to all of its ranks."""
    is_misplaced = any(has in logs[rank].reference.values for rank, pairs in differing.items() for _, has in pairs)
    starts = [(rank, logs[rank].last_producer(*pair)) for rank, pairs in differing.items() for pair in pairs]
    pending: list[Site] = [(rank, index) for rank, index in starts if index is not None]
    seen, roots, read, givers = set(pending), set[Site](), dict[Site, set[Site]](), dict[Site, set[Site]]()
    while pending:
        rank, index = pending.pop()
        sites = joined.together((rank, index))
        earlier = {(peer, producer) for peer, i in sites for producer in logs[peer].bad_producers(i)}
        is_collective = logs[rank].log[index].collective
        if is_collective and not is_misplaced and all(logs[peer].only_packs(producer) for peer, producer in earlier):
            earlier = set()
        read[rank, index] = givers[rank, index] = earlier
        if not earlier:
            givers[rank, index] = fed_wrong((rank, index), logs, joined, known) or {(rank, index)}
            roots |= givers[rank, index]
        pending += sorted(earlier - seen)
        seen |= earlier
    packed = {(rank, index) for rank, index in roots if logs[rank].is_packing(index)}
    for rank, index in sorted(seen - roots, key=joined.when):
        if read[rank, index] <= packed:
            if logs[rank].packs(index):
                packed.add((rank, index))
            elif logs[rank].is_new(index):
                roots.add((rank, index))
    return Roots(roots, givers)


def needed(roots: set[Site], walk: Roots, logs: Sequence[CandidateLog]) -> set[Site]:
    """The roots that alone lead to something wrong which a call of the reference reads.

    Any other may lead to right values by another way: where what it leads to is first read by a call of the reference,
    another root leads there, too, and may be all that is wrong.
    """
    readers: dict[Site, set[Site]] = defaultdict(set)
    for reader, given in walk.givers.items():
        for giver in given - {reader}:
            readers[giver].add(reader)
    only: dict[Site, Site | None] = {root: root for root in roots}  # None where several lead to a call
    pending, found = sorted(roots), set[Site]()
    while pending:
        giver = pending.pop()
        for reader in readers[giver] - roots:
            root = only[giver] if only.get(reader, only[giver]) == only[giver] else None
            if reader not in only or only[reader] != root:
                only[reader] = root
                pending.append(reader)
    for (rank, index), given in walk.givers.items():
        log = logs[rank]
        if not (log.is_new(index) or log.is_extra(index) or log.packs(index)):
            found |= {root for giver in given - {(rank, index)} if (root := only.get(giver)) is not None}
    return found
