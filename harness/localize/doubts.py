"""Calls that may be wrong instead of the blamed call, as values do not decide between them (`Culprit.or_else`).

1. For a bucket that only the candidate has: its collective, and the calls that pack it, on all ranks.
2. Other roots, even if they pack; views of their buckets; earlier calls that put right values in another order.
3. Calls that lead to the blamed call, to an identical call, or to another root, the nearest first. Their inputs and
   outputs are right, but occur more often than in the reference, so such a call may have read one value instead of
   another. Also calls of the reference that read a new call's output.
4. Other producers of the record's value, views of a bucket or of memory that was written to later, and calls that may
   replace a missing call of the reference.

For example, two calls produce the same right value, and a later call reads it by mistake: either producer, or the
reader, may be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit, Doubt
from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.logs.candidate_log import CandidateLog, is_again
from bitproof.harness.localize.logs.joined_logs import JoinedLogs, Site
from bitproof.harness.localize.logs.packing import keeps_order
from bitproof.harness.localize.logs.reference_log import in_any_order

UNSURE = "reads", "adds", "lacks", "misplaces", "exchanges"
"""Defects for which another call may be wrong instead of the blamed call."""

MOST_NEW = 8
"""The number of new rivals whose readers are searched: each takes a walk through its rank's log."""


def doubts(
    culprit: Culprit, rank: int, pair: Pair, rivals: set[Site], logs: Sequence[CandidateLog], joined: JoinedLogs
) -> tuple[Doubt, ...]:
    """The calls that may be wrong instead of the culprit, each with its ranks; empty if the culprit is certain.

    The culprit leads to the record of `rank` with the digests `pair`. `rivals` are other roots of that record.
    """
    if _is_sure(culprit, logs[culprit.rank]):
        return ()
    found = [(culprit.rank, i) for i in _instead_of(culprit, logs[culprit.rank])]
    found += _fillers(culprit, rank, pair, logs, joined)
    found += _and_behind(sorted(rivals, key=joined.when), logs) if culprit.how in UNSURE else []
    found += _reading_new(culprit, rivals, logs)
    found += _readers(culprit, rank, pair, rivals, logs, joined)
    itself = _itself(culprit, logs)
    found = [site for site in found if site not in itself]
    # Calls after an exchange follow from it.
    if culprit.how == "exchanges":
        found = [site for site in found if not joined.before([site], _givers(logs)).intersection(itself)]
    told: dict[str, Doubt] = {}
    for on, index in dict.fromkeys(found):
        call = logs[on].log[index]
        known = told.get(str(call), Doubt(call, ()))
        told[str(call)] = known._replace(ranks=tuple(sorted({*known.ranks, on})))
    return tuple(told.values())


def _givers(logs: Sequence[CandidateLog]) -> Callable[[Site], Iterable[int]]:
    return lambda site: logs[site[0]].givers(site[1])


def _is_sure(culprit: Culprit, log: CandidateLog) -> bool:
    """Whether no other call can be wrong instead of the culprit.

    The culprit is certain if it packs its inputs in another order, or if the reference makes the same call, with the
    same inputs and numbers, and has a different output.
    """
    if culprit.how == "exchanges":
        return culprit.candidate is not None and log.packs(culprit.candidate)
    if culprit.how == "computes":
        return not culprit.call.collective and log.reference.makes(culprit.call)
    return culprit.how not in UNSURE


def _itself(culprit: Culprit, logs: Sequence[CandidateLog]) -> list[Site]:
    """The culprit's calls, on all of its ranks."""
    if culprit.candidate is None:
        return []
    call, turn = logs[culprit.rank].log[culprit.candidate], logs[culprit.rank].turn(culprit.candidate)
    there = ((rank, logs[rank].of_turn(call, turn)) for rank in culprit.ranks)
    return [(rank, index) for rank, index in there if index is not None]


def _fillers(culprit: Culprit, rank: int, pair: Pair, logs: Sequence[CandidateLog], joined: JoinedLogs) -> list[Site]:
    """The collective and the packing calls, on all ranks, of a bucket that only the candidate has.

    The culprit packs or reads this bucket or, if the culprit is a missing call, the record's value comes from it.
    """
    if culprit.candidate is None:
        on, index = rank, logs[rank].giver(*pair)
    else:
        on, index = culprit.rank, culprit.candidate
    bucket = None if index is None else logs[on].bucket_of(index)
    launches = [bucket] if bucket is not None else [] if index is None else _filled(logs[on], index)
    sites = [site for launch in launches for site in joined.together((on, launch))]
    filled = ((rank, i) for rank, launch in sites for i in (launch, *logs[rank].packers(launch)))
    return [(rank, i) for rank, i in filled if not keeps_order(logs[rank].log[i])]


def _filled(log: CandidateLog, index: int) -> list[int]:
    """The collectives of buckets that only the candidate has: the call itself, or those for which the call packs."""
    # Follow the call's output forward through packing. A first call that neither packs nor is a collective ends this.
    packed, found = {index}, list[int]()
    for later, call in enumerate(log.log[index:], index):
        if packed.isdisjoint((later, *log.givers(later))):
            continue
        if call.collective:
            found += [later] if log.packers(later) and not log.reference.alike(call) else []
        elif log.packs(later):
            packed.add(later)
        elif later == index:
            break
    return found


def _readers(
    culprit: Culprit, rank: int, pair: Pair, rivals: set[Site], logs: Sequence[CandidateLog], joined: JoinedLogs
) -> list[Site]:
    """Calls that read or produce a right value more often than in the reference, the nearest first; and views.

    These are points 3 and 4 of the module's docstring.
    """
    repeated = [_too_often(log, _reading) for log in logs]
    again = [repeated[r] | {i for i in _too_often(log, _giving) if log.log[i].outputs} for r, log in enumerate(logs)]
    found, seen = list[Site](), set[Site]()
    gave = [i for i, call in enumerate(logs[rank].log) if _gives(call, pair[1]) and not logs[rank].packs(i)]
    if culprit.candidate is None:
        found += [(rank, i) for i in gave if len(gave) > 1 and i in repeated[rank]]
        pending = [(rank, i, 0) for i in {*gave, logs[rank].giver(*pair)} if i is not None]
    else:
        found += [(rank, i) for i in gave if i != logs[rank].giver(*pair)]
        found += [(culprit.rank, i) for i in _views(logs[culprit.rank], culprit.candidate)]
        pending = [(culprit.rank, i, 0) for i in _alike(logs[culprit.rank], culprit.candidate)]
        pending += [(*rival, 0) for rival in sorted(rivals, key=joined.when) if culprit.how in UNSURE]
    # Breadth first, so that the nearest calls, which are the likeliest, come first.
    while pending:
        on, index, far = pending.pop(0)
        sites = set(joined.together((on, index))) - seen
        seen |= sites
        given = [(peer, giver) for peer, i in sites for giver in logs[peer].givers(i)]
        known = again if far else repeated
        earlier = [(peer, i) for each in given for peer, i in joined.together(each) if i in known[peer]]
        if (on, index) == (culprit.rank, culprit.candidate):
            earlier += [(on, i) for i in _in_another_s_place(culprit, logs[on])]
        if far and logs[on].reads_right_values(index):
            found.append((on, index))
        pending += [(*each, far + 1) for each in earlier if each not in seen]
    return found


def _reading_new(culprit: Culprit, rivals: set[Site], logs: Sequence[CandidateLog]) -> list[Site]:
    """Calls of the reference that may read a new call's output by mistake; for new rivals, their new readers as well.

    The new call may be right. Example: a pass adds `abs h -> a` for a statistic, and `sum` reads a instead of h. A
    reader counts only if the inputs that it should read exist here, and the new call does not read them. If the new
    call reads them, it was inserted before this reader.
    """
    if culprit.how != "adds" or culprit.candidate is None:
        return []
    found = list[Site]()
    others = [(r, i) for r, i in sorted(rivals) if logs[r].is_new(i) or logs[r].is_extra(i)]
    for rank, new in ((culprit.rank, culprit.candidate), *others[:MOST_NEW]):
        log, read, seen = logs[rank], set(logs[rank].log[new].inputs), {new}
        for index in range(new + 1, len(log.log)):
            if seen.isdisjoint(log.givers(index)):
                continue
            call = log.log[index]
            partner, same = log.reference.partner(call, log.turn(index))
            if log.is_new(index) or log.is_extra(index) or partner is None:
                seen.add(index)
                read |= set(call.inputs)
            elif same is None:
                due = set(log.reference.log[partner].inputs) - set(call.inputs)
                found += [(rank, index)] if log.has(due) and read.isdisjoint(due) else []
        if rank != culprit.rank:
            found += [(rank, index) for index in sorted(seen)]
    return found


def _alike(log: CandidateLog, index: int) -> list[int]:
    """A call and those of the same operator, place, inputs and outputs: a reader may have read any of them."""
    call = log.log[index]
    others = [i for i in log.there(call) if (log.log[i].inputs, log.log[i].outputs) == (call.inputs, call.outputs)]
    return sorted(others, key=lambda i: i != index)


def _gives(call: Call, digest: str) -> bool:
    """Whether a call produced a value. A call with several outputs that also reads the value may only have kept it."""
    return digest in call.outputs and not (len(call.outputs) > 1 and digest in call.inputs)


def _too_often(log: CandidateLog, told: Callable[[Call], object]) -> set[int]:
    """The calls whose key (`told`) occurs more often than in the reference; recomputed calls do not count."""
    made = Counter(told(call) for call in log.log if not is_again(call))
    made.subtract(map(told, log.reference.log))
    return {index for index, call in enumerate(log.log) if made[told(call)] > 0 and not is_again(call)}


def _in_another_s_place(culprit: Culprit, log: CandidateLog) -> set[int]:
    """The calls that produced an input which the culprit reads and its partner does not.

    A call counts only if its outputs occur more often than in the reference.
    """
    if culprit.how != "reads" or culprit.reference is None or culprit.candidate is None:
        return set()
    # The partner of a call without a place is a guess.
    is_placed = culprit.call.place != Place(None, None)
    due = Counter(log.reference.log[culprit.reference].inputs if is_placed else ())
    gives_again, read = _too_often(log, _giving), log.log[culprit.candidate].inputs
    odd = Counter(read) - due
    return {
        giver
        for value, giver in zip(read, log.given(culprit.candidate), strict=False)
        if value in odd and giver in gives_again
    }


def _reading(call: Call) -> tuple[str, tuple[str, ...]]:
    return call.operator, in_any_order(call)


def _giving(call: Call) -> tuple[bool, tuple[str, ...]]:
    """A call's outputs, separately for views: a view may well repeat another call's output."""
    return call.view, call.outputs


def _instead_of(culprit: Culprit, log: CandidateLog) -> list[int]:
    """Calls that may replace the culprit, if that is a missing call; those at the culprit's place come first.

    - A call of the culprit's operator, or a new call at its place, that repeats another call's output.
    - A call that the reference does not make, which shares an input with the culprit and has a wrong output; and new
      calls that read the output of such calls.
    - A view of the tensor to which the culprit writes.
    """
    if culprit.candidate is not None:
        return []
    missing = culprit.call
    times = Counter(call.outputs for i, call in enumerate(log.log) if not log.packs(i))
    reads, wrote = set(missing.inputs), missing.inputs[:1] if missing.aliases else None
    found = set[int]()
    for index, call in enumerate(log.log):
        is_new = log.is_new(index) or log.is_extra(index)
        is_like = call.operator == missing.operator or (is_new and call.place in (missing.place, Place(None, None)))
        gives_again = is_like and bool(call.outputs) and times[call.outputs] > 1
        is_own = is_new or not log.reference.alike(call)
        stands_there = is_own and log.differs(index) and bool(reads & set(call.inputs))
        leads_on = is_new and log.differs(index) and not found.isdisjoint(log.givers(index))
        if call.inputs == wrote if call.view else gives_again or stands_there or leads_on:
            found.add(index)
    return sorted(found, key=lambda index: (log.log[index].place != missing.place, index))


def _and_behind(sites: Sequence[Site], logs: Sequence[CandidateLog]) -> list[Site]:
    """The roots `sites`, each followed by the views of it that may show the wrong elements (`_views`)."""
    found = list[Site]()
    for rank, index in sites:
        found += [(rank, index), *((rank, i) for i in _views(logs[rank], index))]
    return found


def _views(log: CandidateLog, index: int) -> list[int]:
    """Views that may show the wrong elements.

    For a collective that only the candidate has: views of its result. For other calls: earlier views of a tensor that
    was written in place to produce an input.
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
