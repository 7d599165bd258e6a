"""Find collectives that get other inputs than in the reference, or another occurrence's inputs; and reordered packs."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site
from bitproof.harness.localize.logs.packing import PACKING, name_of


def fed_wrong(
    site: Site, logs: Sequence[CandidateLog], joined: JoinedLogs, known_joined: JoinedLogs
) -> set[Site] | None:
    """The calls, by rank, of a collective whose inputs differ from those of its counterpart in the reference.

    The counterpart is the reference's collective with the same inputs on the most ranks; group, place, and occurrence
    in the group decide ties. For example, if only rank 1 passes another gradient, the result is rank 1's call. None if
    no rank has the inputs of a collective of the reference, or if only a single rank takes part.
    """
    calls = joined.together(site)
    best: set[Site] | None = None
    least = (0, False, 0, 0)
    for rank, index in calls if len(calls) > 1 else ():
        for partner in logs[rank].reference.alike(logs[rank].log[index]):
            known = {r: known_joined.logs[r][i] for r, i in known_joined.together((rank, partner))}
            mine = {site: logs[site[0]].log[site[1]] for site in calls}
            other = {
                site for site, call in mine.items() if site[0] not in known or known[site[0]].inputs != call.inputs
            }
            moved = sum(site[0] in known and known[site[0]].place != call.place for site, call in mine.items())
            late = abs(known_joined.turn((rank, partner)) - joined.turn((rank, index)))
            # In order of weight: ranks with other inputs, another group, calls at other places, a distant occurrence.
            unlike = len(other), known.keys() != {r for r, _ in calls}, moved, late
            if best is None or unlike < least:
                best, least = other, unlike
    return best


def fed_otherwise(site: Site, due: Site, joined: JoinedLogs, known_joined: JoinedLogs) -> set[Site]:
    """The calls, by rank, of a collective whose inputs differ from the inputs of the reference's collective `due`."""
    theirs = {rank: known_joined.logs[rank][index] for rank, index in known_joined.together(due)}
    mine = ((rank, index, joined.logs[rank][index]) for rank, index in joined.together(site))
    return {(rank, index) for rank, index, call in mine if rank in theirs and call.inputs != theirs[rank].inputs}


def out_of_turn(
    site: Site, partner: int, logs: Sequence[CandidateLog], joined: JoinedLogs, known_joined: JoinedLogs
) -> tuple[Site, int] | None:
    """The first collective to which a rank passed the value of another occurrence, and its counterpart's index.

    Example: rank 0 sends micro-batches 0 and 1 in reverse order. Every later call reads the output of the same call as
    in the reference, so no later call is wrong. The search follows the producers back from the call `site` and from
    its reference `partner`, in parallel. None if there is no such collective.
    """
    pending, seen = [(*site, partner)], set[Site]()
    while pending:
        rank, index, due = pending.pop()
        for made, wanted in logs[rank].wired_alike(index, due):
            if (rank, made) in seen:
                continue
            seen.add((rank, made))
            pending.append((rank, made, wanted))
            known = dict(known_joined.together((rank, wanted)))
            fed = joined.together((rank, made)) if logs[rank].log[made].collective else []
            # The first collective at which a rank passes another value is the cause: all calls after it are connected
            # as in the reference.
            others = [
                (r, i) for r, i in fed if r in known and logs[r].log[i].inputs != known_joined.logs[r][known[r]].inputs
            ]
            if others:
                first = min(others, key=joined.when)
                return first, known[first[0]]
    return None


def is_packed_otherwise(log: CandidateLog, missing: int) -> bool:
    """Whether some call packs the inputs of the reference's call `missing` in another order."""
    wanted = log.reference.log[missing]
    values = sorted(wanted.inputs)
    return name_of(wanted) in PACKING and any(
        call.operator == wanted.operator and call.inputs != wanted.inputs and sorted(call.inputs) == values
        for call in log.log
    )
