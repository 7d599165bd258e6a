"""The roots of differing records: wrong calls that lead to one and have no wrong input (rule 1 of `blame`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.collective_inputs import fed_wrong
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site


class Roots(NamedTuple):
    """`found`: the roots. `givers`: for each wrong call on a path, the calls that produced its wrong inputs.

    A call without wrong inputs has itself as its giver; for a collective, the ranks' calls with different inputs.
    """

    found: set[Site]
    givers: Mapping[Site, set[Site]]


def roots_of(
    differing: Mapping[int, Iterable[Pair]], logs: Sequence[CandidateLog], joined: JoinedLogs, known: JoinedLogs
) -> Roots:
    """Walk back from the differing tensors of each rank over wrong calls, at a collective to all of its ranks.

    `joined` and `known` order the candidate's and the reference's logs. For example, if rank 1 passes a wrong gradient
    to an all-reduce, the walk goes from rank 0's parameter to the collective, and on to rank 1's call.
    """
    is_misplaced = any(has in logs[rank].reference.values for rank, pairs in differing.items() for _, has in pairs)
    starts = [(rank, logs[rank].last_producer(*pair)) for rank, pairs in differing.items() for pair in pairs]
    pending: list[Site] = [(rank, index) for rank, index in starts if index is not None]
    seen, roots, read, givers = set(pending), set[Site](), dict[Site, set[Site]](), dict[Site, set[Site]]()
    while pending:
        rank, index = pending.pop()
        sites = joined.together((rank, index))
        earlier = {(peer, producer) for peer, i in sites for producer in logs[peer].bad_producers(i)}
        # A collective whose wrong inputs only pack right values is a root itself, as packing need not be wrong.
        # But if another tensor's right value was recorded, the packing may have exchanged the two.
        is_collective = logs[rank].log[index].collective
        if is_collective and not is_misplaced and all(logs[peer].only_packs(producer) for peer, producer in earlier):
            earlier = set()
        # Without wrong inputs it is a root; of a collective, the calls on those ranks that pass another input.
        read[rank, index] = givers[rank, index] = earlier
        if not earlier:
            givers[rank, index] = fed_wrong((rank, index), logs, joined, known) or {(rank, index)}
            roots |= givers[rank, index]
        pending += sorted(earlier - seen)
        seen |= earlier
    # Packing roots may be right. Then a new call that reads only their values is the first that computes from them, and
    # a root as well.
    packed = {(rank, index) for rank, index in roots if logs[rank].is_packing(index)}
    for rank, index in sorted(seen - roots, key=joined.when):
        if read[rank, index] <= packed:
            if logs[rank].packs(index):
                packed.add((rank, index))
            elif logs[rank].is_new(index):
                roots.add((rank, index))
    return Roots(roots, givers)


def needed(roots: set[Site], walk: Roots, logs: Sequence[CandidateLog]) -> set[Site]:
    """The roots that are certainly wrong: each alone leads to a wrong value that a call of the reference reads.

    Example: a new call adds the outputs of roots a and b, and a call of the reference reads the sum. Either root may be
    right, so neither is needed. If a call of the reference reads the output of a itself, a is needed.
    """
    readers: dict[Site, set[Site]] = defaultdict(set)
    for reader, given in walk.givers.items():
        for giver in given - {reader}:
            readers[giver].add(reader)
    # None if several roots lead to a call.
    only: dict[Site, Site | None] = {root: root for root in roots}
    pending, found = sorted(roots), set[Site]()
    # Propagate each root forward to its readers, until nothing changes. An entry only changes to None, so this ends.
    while pending:
        giver = pending.pop()
        for reader in readers[giver] - roots:
            root = only[giver] if only.get(reader, only[giver]) == only[giver] else None
            if reader not in only or only[reader] != root:
                only[reader] = root
                pending.append(reader)
    # A new or extra call, and a pack, may read a wrong value and still lead to right values. A call of the reference
    # that computes may not: the root that alone leads to its input is wrong.
    for (rank, index), given in walk.givers.items():
        log = logs[rank]
        if not (log.is_new(index) or log.is_extra(index) or log.packs(index)):
            found |= {root for giver in given - {(rank, index)} if (root := only.get(giver)) is not None}
    return found
