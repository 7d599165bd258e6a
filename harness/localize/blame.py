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
5. Where the answer only reads another right value than its partner does, or where there is no root, a
   call may be missing: the first call of the reference, in the history of the value that the candidate
   should have had, whose output the candidate has nowhere and whose inputs it has.
6. No call of the update is wrong where what it is given is: where a tensor that differs is another right value and its
   own was computed, as where two gradients are exchanged, the call that gave its own is the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from harness.errors import cut
from harness.localize.calls import Call
from harness.localize.culprit import Culprit, How
from harness.localize.packing import CONSTANTS, PACKING, keeps_order, name_of
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
    logs = [_Log(calls, ready) for calls, ready in zip(candidate, known, strict=True)]
    picked = _pick(logs, differing)
    missing = _missing_for(logs, picked) if picked is not None and picked.reads else None
    if missing is not None and missing.how == "abandons":  # a bucket that is packed wrong is waited for
        return missing
    if picked is None or (picked.reads and _loses(logs, picked)):
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
    if partner is not None and same is None:
        missing = _missing_for(logs, picked)
        if missing is not None:
            return missing
    how: How = same or ("reads" if partner is not None else "adds")
    if call.collective and not call.outputs:
        how = "abandons"
    arguments = _unlike_arguments(call, log.reference.log[partner]) if partner is not None else ""
    other = log.replaced_by(call) if how == "adds" else None
    if other is not None:
        call = call._replace(place=other.place)
    return Culprit(
        how=how,
        call=call,
        ranks=ranks,
        candidate=index,
        reference=partner,
        arguments=arguments,
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


def _pick(logs: Sequence[_Log], differing: Differing) -> _Picked | None:
    """Rule 4. What makes a value of nothing, as `arange`, goes by numbers, which other calls may have got wrong."""
    roots = _roots(logs, differing)
    if not roots:
        return None
    packing = {(rank, index) for rank, index in roots if logs[rank].is_packing(index)}
    computing = {(rank, index) for rank, index in roots - packing if logs[rank].calls[index].inputs}
    picked = _first_of(computing or roots, logs, roots)
    return _first_of(packing, logs, roots) if packing and picked.reads else picked  # what was packed in another place


def _first_of(sites: set[Site], logs: Sequence[_Log], roots: set[Site]) -> _Picked:
    """The first site in execution order, on the lowest rank."""
    index, rank = min((index, rank) for rank, index in sites)
    log = logs[rank]
    return _Picked((rank, index), *log.reference.partner(log.calls[index], log.turn(index)), roots)


def _loses(logs: Sequence[_Log], picked: _Picked) -> bool:
    """Whether a collective of the reference has no output here, though its input is: a bucket was packed wrong."""
    log = logs[picked.site[0]]
    if log.is_extra(picked.site[1]):  # what a pass put there is wrong, and no bucket
        return False
    launched = (known for known in log.reference.log if known.collective and known.outputs)
    return any(log.has_all(known.inputs) and not log.has_all(known.outputs) for known in launched)


def _missing_for(logs: Sequence[_Log], picked: _Picked) -> Culprit | None:
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


def _first_missing(
    logs: Sequence[_Log], wanted: Mapping[int, Iterable[str]], before: int | None = None
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
    return Culprit(how="lacks", call=call, ranks=ranks, candidate=None, reference=index)


def _misplaced(logs: Sequence[_Log], differing: Differing) -> Culprit | None:
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
    call, ranks = logs[rank].calls[index], tuple(sorted({peer for i, peer in found if i == index}))
    return Culprit(how="misplaces", call=call, ranks=ranks, candidate=index, reference=None)


def _roots(logs: Sequence[_Log], differing: Differing) -> set[Site]:
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


class _Log:
    """One rank's calls, and which of them agree with the reference's."""

    def __init__(self, calls: Sequence[Call], reference: ReferenceLog) -> None:
        self.calls = calls
        self.reference = reference
        self.collectives = [index for index, call in enumerate(calls) if call.collective]
        self._values = {value for call in calls for value in (*call.inputs, *call.outputs)}
        self._agrees = [reference.knows(call) or self._changes_nothing(index) for index, call in enumerate(calls)]
        self._latest: dict[str, int] = {}
        self.trusts_parts = True
        self._bad: list[tuple[int, ...]] = []
        self._unpacked: list[set[int]] = []
        for index, call in enumerate(calls):
            producers = call.producers or (None,) * len(call.inputs)
            pairs = zip(call.inputs, producers, strict=True)
            given = (self._latest.get(value) if producer is None else producer for value, producer in pairs)
            found = [producer for producer in given if producer is not None]
            unpacked = {
                i for i in found if self._unpacks(i) and set(calls[i].outputs) & set(call.inputs) <= reference.values
            }
            self._unpacked.append(unpacked)
            self._bad.append(tuple(i for i in found if not self._agrees[i]))
            for value in (*call.aliases, *call.outputs):
                self._latest[value] = index

    def turn(self, index: int) -> int:
        """How many calls of the same operator at the same place came before."""
        call = self.calls[index]
        return sum((earlier.place, earlier.operator) == (call.place, call.operator) for earlier in self.calls[:index])

    def last_producer(self, digest: str) -> int | None:
        """The last call that gave this value, unless it agrees."""
        index = self._latest.get(digest)
        return None if index is None or self._agrees[index] else index

    def new_constant(self, index: int, partner: int | None) -> int | None:
        """A new call that made, of nothing, an input that a call's partner does not have; None where there is none."""
        call, theirs = self.calls[index], self.reference.log[partner].inputs if partner is not None else ()
        odd = [i for x, i in zip(call.inputs, call.producers, strict=False) if x not in theirs and i is not None]
        return next((i for i in odd if self.is_new(i) and name_of(self.calls[i]) in CONSTANTS), None)

    def bad_producers(self, index: int) -> set[int]:
        """The calls that gave a call's inputs and do not agree."""
        found, pending = set(), self._bad_inputs(index)
        while pending:
            producer = pending.pop()
            view = self.calls[producer]
            if view.view and (self.is_new(index) or keeps_order(view)):
                pending += self._bad_inputs(producer)
            else:
                found.add(producer)
        return found

    def _bad_inputs(self, index: int) -> list[int]:
        """The same, views included; a right part of a bucket is right, where it is trusted, wherever it belongs."""
        unpacked = self._unpacked[index] if self.trusts_parts else ()
        return [producer for producer in self._bad[index] if producer not in unpacked]

    def has_all(self, values: Iterable[str]) -> bool:
        """Whether this log has each of some values somewhere."""
        return self._values.issuperset(values)

    def packs(self, index: int) -> bool:
        """Whether a call computes nothing: it puts values together, or takes them apart."""
        return self.calls[index].view or name_of(self.calls[index]) in PACKING

    def _unpacks(self, index: int) -> bool:
        """Whether a call takes apart what the reference has nowhere: then its parts count each by itself."""
        return self.packs(index) and not self.reference.values.issuperset(self.calls[index].inputs)

    def only_packs(self, index: int) -> bool:
        """Whether a call puts right values together and computes nothing, as far as it is known by its operator."""
        return name_of(self.calls[index]) in PACKING and all(map(self.only_packs, self.bad_producers(index)))

    def is_packing(self, index: int) -> bool:
        """Whether a call only packs right values, or is the collective of such."""
        earlier = self.bad_producers(index)
        return self.only_packs(index) or (bool(earlier) and all(map(self.only_packs, earlier)))

    def first_missing(self, wanted: Iterable[str], before: int | None = None) -> int | None:
        """In the reference's log, the first call whose output this log has nowhere and whose inputs it has.

        What it has from call `before` on alone, and in another direction, it has nowhere: backward may divide again.
        """
        made_late = {value for call in self.calls[before:] for value in call.outputs} if before is not None else set()
        there = self._values - made_late  # what is given to the step is there, whoever reads it when
        there |= {value for call in self.calls[:before] for value in (*call.inputs, *call.outputs)}
        late = {(value, call.place.direction) for call in self.calls[before:] for value in call.outputs}

        def is_missing(value: str) -> bool:
            index = self.reference.producer(value)
            direction = None if index is None else self.reference.log[index].place.direction
            return value not in there and (value, direction) not in late

        pending, seen, found = [*filter(is_missing, wanted)], set(), []
        while pending:
            index = self.reference.producer(pending.pop())
            if index is None or index in seen:
                continue
            seen.add(index)
            earlier = [*filter(is_missing, self.reference.log[index].inputs)]
            pending += earlier
            if not earlier:
                found.append(index)
        return min(found, default=None)

    def replaced_by(self, call: Call) -> Call | None:
        """The first call of the reference that reads what a new call reads and that this log does not make.

        What a pass puts in a call's place says nothing of where it belongs; that call does.
        """
        made = Counter((mine.operator, mine.place) for mine in self.calls)
        due = Counter((known.operator, known.place) for known in self.reference.log)
        for known in self.reference.log:
            kind = known.operator, known.place
            reads_it = bool(call.inputs) and set(call.inputs) <= set(known.inputs)
            if reads_it and not known.view and made[kind] < due[kind] and self._values.isdisjoint(known.outputs):
                return known
        return None

    def is_new(self, index: int) -> bool:
        """Whether the reference never calls such an operator there."""
        return not self.reference.calls(self.calls[index])

    def _changes_nothing(self, index: int) -> bool:
        """Whether a call that the reference does not make gives a right value that it reads, as a product with 1."""
        call = self.calls[index]
        is_same = bool(call.outputs) and not call.collective and set(call.outputs) <= set(call.inputs)
        return is_same and self.reference.values.issuperset(call.outputs) and self.is_extra(index)

    def is_extra(self, index: int) -> bool:
        """Whether more calls of its operator are made at its place than the reference makes."""
        kind = self.calls[index].operator, self.calls[index].place
        made, due = (
            [(call.operator, call.place) for call in log].count(kind) for log in (self.calls, self.reference.log)
        )
        return made > due

    def same_collective(self, turn: int, call: Call) -> int | None:
        """This rank's part in a collective that another rank launched as its turn-th.

        Collectives are what all ranks launch alike; a rank may make calls of its own between them.
        """
        index = self.collectives[turn] if turn < len(self.collectives) else None
        return index if index is not None and self.has_same(index, call) else None

    def has_same(self, index: int, call: Call) -> bool:
        """Whether this rank made the same call at the same point of its log."""
        mine = self.calls[index] if index < len(self.calls) else None
        return mine is not None and (mine.place, mine.operator) == (call.place, call.operator)
