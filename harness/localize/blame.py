"""Which call is to blame: the first, in execution order, whose inputs agree and whose output does not.

1. A call of the candidate agrees when the reference called the same operator in the same direction and
   got the same outputs; chunk 0 may not stand for chunk 1, but what runs once may stand for either, and so
   may a call whose direction is not known. The module does not count: passes write joins and sums of their
   own. A call of an operator that the reference never called agrees when the reference computed its values
   in some other way; so does a view, when its input agrees and any view of the reference came to its outputs.
2. Start at the tensors that differ, and walk back from each call to those that computed its inputs, as
   long as some input does not agree: to the call that left an input in its memory, and, where that is
   not known, to the last one that gave such a value. A call whose inputs all agree is a root. Values that
   differ and reach no result are never visited, so what a pass adds raises no suspicion by itself. A view
   is passed over in favor of the call that reads it, where the reference has no such call; one that keeps
   all elements in their order is always passed over, as no value in it can be wrong.
3. A collective's inputs are those of all ranks that took part: a rank that received bad rows is not to
   blame, nor is the collective; the rank that sent them is. What only packs right values for a collective, as a
   bucket does, has values that the reference has nowhere, and computes nothing: then the collective is to blame,
   unless a tensor that differs holds another right value, as one that was packed in the wrong place does.
   A part of a bucket that is right by itself is right, so what reads it may be to blame; and a new call that changes
   a right bucket is a root. But where a value that only its collective could have given is lost, parts are not trusted.
4. Of the roots, the first in execution order is the answer, on the lowest rank; the others are listed. What packs, and
   the collective of a bucket, are the answer only where no other call is, or where that only reads what was packed in
   another place: the reference has a bucket's values nowhere. What reads nothing is the answer only where no other
   computes, nor packs before it: how long `arange` is follows from what was joined wrong. Where the answer only reads
   another right value, and a new call made that of nothing, such as zeros, that call is the answer.
   Where the answer is a part of a sum that the reference takes in another grouping, it belongs where that sum does.
5. Where the answer only reads another right value than its partner does, or where there is no root, a
   call may be missing: the first call of the reference, in the history of the value that the candidate
   should have had, whose output the candidate has nowhere and whose inputs it has.
6. No call of the update is wrong where what it is given is: where a tensor that differs is another right value and its
   own was computed, as where two gradients are exchanged, the call that gave its own is the answer; the collective of a
   bucket where that call only reads parts of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from harness.errors import cut
from harness.localize.calls import Call, maker_of
from harness.localize.candidate_log import CandidateLog
from harness.localize.culprit import Culprit, How
from harness.localize.reference_log import ReferenceLog

Site = tuple[int, int]
"""A rank, and a call's index in its log."""


Differing = Mapping[int, Iterable[tuple[str, str]]]
"""By rank, the digests of each tensor that differs: the reference's and the candidate's."""


def find_culprit(
    reference: Sequence[Sequence[Call] | ReferenceLog], candidate: Sequence[Sequence[Call]], differing: Differing
) -> Culprit | None:
    """Compare one step's logs, one a rank; the reference's may have been made ready, for many candidates.

    None when no call explains what differs: it was changed outside of every operator.
    """
    known = [log if isinstance(log, ReferenceLog) else ReferenceLog(log) for log in reference]
    logs = [CandidateLog(calls, ready) for calls, ready in zip(candidate, known, strict=True)]
    picked = _pick(logs, differing)
    missing = _missing_for(logs, picked) if picked is not None and picked.reads else None
    if missing is not None and missing.how == "abandons":  # a bucket that is packed wrong is waited for
        return missing
    if picked is None or (picked.reads and _loses(logs, picked, differing)):
        for each in logs:
            each.trusts_parts = False
        picked = _pick(logs, differing)
    if picked is None:
        return _first_missing(logs, {rank: [wanted for wanted, _ in pairs] for rank, pairs in differing.items()})
    (first_rank, index), partner, same, roots = picked
    log = logs[first_rank]
    call = log.calls[index]
    if same != "computes" and call.place.direction == "update" and (misplaced := _misplaced(logs, differing)):
        return misplaced
    if picked.reads and (constant := log.new_constant(index, partner)) is not None:
        roots = {(rank, constant) for rank, each in roots if each == index}
        index, call, partner, same = constant, log.calls[constant], None, None
    ranks = tuple(sorted(r for r, i in roots if i == index and logs[r].has_same(i, call)))
    if same is None and (whole := log.regrouped(call)) is not None:
        call = call._replace(place=whole.place)
        return Culprit(how="regroups", call=call, ranks=ranks, candidate=index, reference=None)
    if partner is not None and same is None:
        missing = _missing_for(logs, picked)
        if missing is not None:
            return missing
    how: How = same or ("reads" if partner is not None else "adds")
    if call.collective and not call.outputs:
        how = "abandons"
    arguments = _unlike_arguments(call, log.reference.log[partner]) if partner is not None else ""
    other = log.replaced_by(call) if how == "adds" else None
    other_place = other or (log.put_before(index) if how == "adds" else None)
    if other_place is not None:
        call = call._replace(place=other_place.place)
    return Culprit(
        how=how,
        call=call,
        ranks=ranks,
        candidate=index,
        reference=partner,
        arguments=arguments,
        reading=_unlike_input(log, index, partner) if partner is not None and how == "reads" else "",
        instead_of=other.operator if other is not None else "",
    )


class _Picked(NamedTuple):
    """A root that is the answer, its partner, what is wrong with it where that has its inputs, and all roots."""

    site: Site
    partner: int | None
    same: Literal["computes", "exchanges"] | None
    roots: set[Site]

    @property
    def reads(self) -> bool:
        """Whether it only reads other values than its partner."""
        return self.partner is not None and self.same is None


def _pick(logs: Sequence[CandidateLog], differing: Differing) -> _Picked | None:
    """Rule 4. What makes a value of nothing, as `arange`, goes by numbers, which other calls may have got wrong."""
    roots = _roots(logs, differing)
    if not roots:
        return None
    packing = {(rank, index) for rank, index in roots if logs[rank].is_packing(index)}
    computing = {(rank, index) for rank, index in roots - packing if logs[rank].calls[index].inputs}
    picked = _first_of(computing or roots, logs, roots)
    return _first_of(packing, logs, roots) if packing and picked.reads else picked  # what was packed in another place


def _first_of(sites: set[Site], logs: Sequence[CandidateLog], roots: set[Site]) -> _Picked:
    """The first site in execution order, on the lowest rank."""
    index, rank = min((index, rank) for rank, index in sites)
    log = logs[rank]
    partner, same = log.reference.partner(log.calls[index], log.turn(index))
    if same is None and (first := log.repeated_by(index)) is not None:
        partner, _ = log.reference.partner(log.calls[first], log.turn(first))
    if same is None and log.is_extra(index):  # a call too many of its operator, and the reference makes none of these
        partner = None
    return _Picked((rank, index), partner, same, roots)


def _loses(logs: Sequence[CandidateLog], picked: _Picked, differing: Differing) -> bool:
    """Whether what first went missing is what a collective gives, though its input is there: a bucket was packed wrong.

    Of other collectives a bucket may give the parts in other shapes.
    """
    if logs[picked.site[0]].is_extra(picked.site[1]):  # what a pass put there is wrong, and no bucket
        return False
    for rank, pairs in differing.items():
        index = logs[rank].first_missing(wanted for wanted, _ in pairs)
        if index is not None and logs[rank].reference.log[index].collective:
            return True
    return False


def _missing_for(logs: Sequence[CandidateLog], picked: _Picked) -> Culprit | None:
    """Rule 5, for what the partner of a root reads."""
    rank, index = picked.site
    read = logs[rank].reference.log[picked.partner].inputs if picked.partner is not None else ()
    return _first_missing(logs, {rank: read}, index)


def _unlike_arguments(call: Call, partner: Call) -> str:
    """The numbers and words in which two calls of one operator differ: `eps=1e-05 where the reference has 1e-06`."""
    theirs = dict(partner.scalars)
    unlike = [(name, value, theirs[name]) for name, value in call.scalars if theirs.get(name, value) != value]
    told = ", ".join(f"{name}={mine} where the reference has {other}" for name, mine, other in unlike)
    return cut(told, 300)


def _unlike_input(log: CandidateLog, index: int, partner: int) -> str:
    """What computed the last input that the partner does not read, and what computed the one that it has instead.

    Nothing is told where the partner is guessed: it has none of the inputs, and the logs make not as many such calls.
    """
    if set(log.calls[index].inputs).isdisjoint(log.reference.log[partner].inputs) and log.made_as(partner) != index:
        return ""
    sides = (log.calls, index), (log.reference.log, partner)
    inputs = [Counter(calls[at].inputs) for calls, at in sides]
    told: list[str] = []
    for (calls, at), other in zip(sides, reversed(inputs), strict=True):
        odd = Counter(calls[at].inputs) - other
        position = next((i for i, value in reversed(list(enumerate(calls[at].inputs))) if value in odd), None)
        if position is None:
            return ""
        made = maker_of(calls, at, position)
        told.append("what the step is given" if made is None else f"what {made} gives")
    return cut(f"{told[0]}, where the reference has {told[1]}", 300) if told[0] != told[1] else ""


def _first_missing(
    logs: Sequence[CandidateLog], wanted: Mapping[int, Iterable[str]], before: int | None = None
) -> Culprit | None:
    """Rule 5, for values that the candidate should have had, by rank, before some call where that is known."""
    found = {rank: logs[rank].first_missing(values, before) for rank, values in wanted.items()}
    indices = {rank: index for rank, index in found.items() if index is not None}
    if not indices:
        return None
    index = min(indices.values())
    ranks = tuple(sorted(rank for rank, other in indices.items() if other == index))
    call = logs[ranks[0]].reference.log[index]
    for number, mine in enumerate(logs[ranks[0]].calls if call.collective else ()):
        if not mine.outputs and (mine.operator, mine.inputs) == (call.operator, call.inputs):
            return Culprit(how="abandons", call=mine, ranks=ranks, candidate=number, reference=index)
    log = logs[ranks[0]]
    if (made := log.made_as(index)) is not None:  # of another value: that is what is wrong, and no call is missing
        if (between := log.put_between(index, made)) is not None:
            return Culprit(how="adds", call=log.calls[between], ranks=ranks, candidate=between, reference=None)
        if not log.calls[made].view and log.reference.values.issuperset(log.calls[made].inputs):
            return Culprit(how="reads", call=log.calls[made], ranks=ranks, candidate=made, reference=index)
    return Culprit(how="lacks", call=call, ranks=ranks, candidate=None, reference=index)


def _misplaced(logs: Sequence[CandidateLog], differing: Differing) -> Culprit | None:
    """Rule 6: the first call before the update that gave what a tensor should hold which holds another right value."""
    found: list[tuple[int, int]] = []
    for rank, pairs in differing.items():
        last: dict[str, int] = {}
        values = {wanted for wanted, has in pairs if has in logs[rank].reference.values}
        for index, call in enumerate(logs[rank].calls):
            if call.place.direction != "update":
                last |= dict.fromkeys(values.intersection(call.outputs), index)
        found += [(index, rank) for index in last.values()]
    if not found:
        return None
    index, rank = min(found)
    bucket = logs[rank].bucket_of(index)
    if bucket is not None:  # it was packed, or unpacked, in another order
        found, index = [(bucket, peer) for i, peer in found if i == index], bucket
    call, ranks = logs[rank].calls[index], tuple(sorted({peer for i, peer in found if i == index}))
    return Culprit(how="misplaces", call=call, ranks=ranks, candidate=index, reference=None)


def _roots(logs: Sequence[CandidateLog], differing: Differing) -> set[Site]:
    """Every call in the history of the differing tensors whose inputs agree and whose outputs do not."""
    is_misplaced = any(has in logs[rank].reference.values for rank, pairs in differing.items() for _, has in pairs)
    starts = [(rank, log.last_producer(has)) for rank, log in enumerate(logs) for _, has in differing.get(rank, ())]
    pending: list[Site] = [(rank, index) for rank, index in starts if index is not None]
    seen, roots, read = set(pending), set(), {}
    while pending:
        rank, index = pending.pop()
        sites = [(rank, index)]
        if logs[rank].calls[index].collective:
            turn, call = logs[rank].collectives.index(index), logs[rank].calls[index]
            sites = [(r, i) for r, log in enumerate(logs) if (i := log.same_collective(turn, call)) is not None]
        earlier = {(peer, producer) for peer, i in sites for producer in logs[peer].bad_producers(i)}
        is_collective = logs[rank].calls[index].collective
        if is_collective and not is_misplaced and all(logs[peer].only_packs(producer) for peer, producer in earlier):
            earlier = set()
        if not earlier:
            roots.add((rank, index))
        read[rank, index] = earlier
        pending += sorted(earlier - seen)
        seen |= earlier
    packed = {(rank, index) for rank, index in roots if logs[rank].is_packing(index)}
    for rank, index in sorted(seen - roots, key=lambda site: site[1]):
        if read[rank, index] <= packed:
            if logs[rank].packs(index):
                packed.add((rank, index))
            elif logs[rank].is_new(index):
                roots.add((rank, index))
    return roots
