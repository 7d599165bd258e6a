"""Calls of which no value tells whether they are wrong in place of the one to blame: see `Culprit.or_else`.

1. The collective of a bucket that the reference does not have, and what fills it, on each rank.
2. Other roots.
3. What leads to the blamed call, reads right values and gives right ones, and reads them more often than the reference
   does: it may have read one in another's place.
4. Other calls that gave what the record holds, views of a bucket or of what was written to since, and what may stand
   where a call of the reference is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit, Doubt
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog, is_again
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site
from bitproof.harness.localize.logs.packing import keeps_order

UNSURE = "reads", "adds", "lacks", "misplaces", "exchanges"
"""The defect of a call that may be wrong in the blamed call's place."""


def doubts(
    culprit: Culprit, rank: int, pair: Pair, rivals: set[Site], logs: Sequence[CandidateLog], joined: JoinedLogs
) -> tuple[Doubt, ...]:
    """The calls that may be wrong in the blamed one's place, where that leads to a record of a rank.

    First its own collective on other ranks, where the reference has no such, then the `rivals`: other roots.
    """
    if _is_sure(culprit, logs[culprit.rank]):
        return ()
    found = _fillers(culprit, rank, pair, logs, joined)
    found += sorted(rivals, key=joined.when) if culprit.how in UNSURE else []
    found += _readers(culprit, rank, pair, logs, joined)
    itself = _itself(culprit, logs)
    found = [site for site in found if site not in itself]
    told: dict[str, Doubt] = {}
    for on, index in dict.fromkeys(found):
        call = logs[on].log[index]
        known = told.get(str(call), Doubt(call, ()))
        told[str(call)] = known._replace(ranks=tuple(sorted({*known.ranks, on})))
    return tuple(told.values())


def _is_sure(culprit: Culprit, log: CandidateLog) -> bool:
    """Whether nothing before the blamed call can be wrong in its place.

    It packs what it should in another order; or the reference makes that very call, and gets another value.
    """
    if culprit.how == "exchanges":
        return culprit.candidate is not None and log.packs(culprit.candidate)
    if culprit.how == "computes":
        return not culprit.call.collective and log.reference.makes(culprit.call)
    return culprit.how not in UNSURE


def _itself(culprit: Culprit, logs: Sequence[CandidateLog]) -> list[Site]:
    """The blamed call on all ranks that it is blamed on."""
    if culprit.candidate is None:
        return []
    call, turn = logs[culprit.rank].log[culprit.candidate], logs[culprit.rank].turn(culprit.candidate)
    there = ((rank, logs[rank].of_turn(call, turn)) for rank in culprit.ranks)
    return [(rank, index) for rank, index in there if index is not None]


def _fillers(culprit: Culprit, rank: int, pair: Pair, logs: Sequence[CandidateLog], joined: JoinedLogs) -> list[Site]:
    """Of a bucket that the reference does not have: its collective and what fills it, on all ranks.

    It is one that the blamed call fills or reads, or out of which a record comes where a call is missing.
    """
    if culprit.candidate is None:
        on, index = rank, logs[rank].giver(*pair)
    else:
        on, index = culprit.rank, culprit.candidate
    launch = None if index is None else logs[on].bucket_of(index) or _filled(logs[on], index)
    sites = [] if launch is None else joined.together((on, launch))
    filled = ((rank, i) for rank, launch in sites for i in (launch, *logs[rank].packers(launch)))
    return [(rank, i) for rank, i in filled if not keeps_order(logs[rank].log[i])]


def _filled(log: CandidateLog, index: int) -> int | None:
    """The collective of a bucket of the candidate's that a call is, or fills."""
    packed = {index}
    for later, call in enumerate(log.log[index:], index):
        if packed.isdisjoint((later, *log.givers(later))):
            continue
        if call.collective:
            return later if log.packers(later) and not log.reference.alike(call) else None
        if log.packs(later):
            packed.add(later)
        elif later == index:
            break
    return None


def _readers(culprit: Culprit, rank: int, pair: Pair, logs: Sequence[CandidateLog], joined: JoinedLogs) -> list[Site]:
    """Those that read a value more often than the reference does, and views."""
    repeated = [_reads_too_often(log) for log in logs]
    found, seen = list[Site](), set[Site]()
    gave = [i for i, call in enumerate(logs[rank].log) if pair[1] in call.outputs and not logs[rank].packs(i)]
    if culprit.candidate is None:
        found += [(rank, i) for i in gave if len(gave) > 1 and i in repeated[rank]]
        found += [(culprit.rank, i) for i in _instead_of(culprit.call, logs[culprit.rank])]
        pending = [(rank, i, 0) for i in {*gave, logs[rank].giver(*pair)} if i is not None]
    else:
        found += [(rank, i) for i in gave if i != logs[rank].giver(*pair)]
        found += [(culprit.rank, i) for i in _views(logs[culprit.rank], culprit.candidate)]
        pending = [(culprit.rank, culprit.candidate, 0)]
    while pending:
        on, index, far = pending.pop()
        sites = set(joined.together((on, index))) - seen
        seen |= sites
        given = ((peer, giver) for peer, i in sites for giver in logs[peer].givers(i))
        earlier = [(peer, i) for each in given for peer, i in joined.together(each) if i in repeated[peer]]
        if far and logs[on].reads_right_values(index):
            found.append((on, index))
        pending += [(*each, far + 1) for each in earlier if each not in seen]
    return sorted(found, key=joined.when)


def _reads_too_often(log: CandidateLog) -> set[int]:
    """The calls of which more, of one operator and the same inputs, are made than in the reference.

    What is computed again does not count.
    """
    made = Counter(_reading(call) for call in log.log if not is_again(call))
    made.subtract(map(_reading, log.reference.log))
    return {index for index, call in enumerate(log.log) if made[_reading(call)] > 0 and not is_again(call)}


def _reading(call: Call) -> tuple[str, tuple[str, ...]]:
    return call.operator, tuple(sorted(call.inputs))


def _instead_of(missing: Call, log: CandidateLog) -> list[int]:
    """What may stand where a call of the reference is missing.

    A call of its operator that gives what another one gives; a new one that reads what it reads and gives what the
    reference has nowhere; a view of what it writes to.
    """
    times = Counter(call.outputs for i, call in enumerate(log.log) if not log.packs(i))
    reads, wrote = set(missing.inputs), missing.inputs[:1] if missing.aliases else None

    def may_stand_there(index: int, call: Call) -> bool:
        if call.view:
            return call.inputs == wrote
        if call.operator == missing.operator:
            return times[call.outputs] > 1
        return log.is_new(index) and log.differs(index) and not reads.isdisjoint(call.inputs)

    return [i for i, call in enumerate(log.log) if may_stand_there(i, call)]


def _views(log: CandidateLog, index: int) -> list[int]:
    """Views that may show other elements than they should: of a bucket that a call sums, or of what it reads.

    The latter where the call that left what is read wrote to the tensor whose part the view shows.
    """
    call = log.log[index]
    if call.collective and not log.reference.alike(call):
        return [i for i, each in enumerate(log.log) if each.view and index in log.given(i)]
    writers = [i for i in log.givers(index) if set(call.inputs) & set(log.log[i].aliases)]
    return [
        i
        for writer in writers
        for i, each in enumerate(log.log[:writer])
        if each.view and each.inputs == log.log[writer].inputs[:1]
    ]
