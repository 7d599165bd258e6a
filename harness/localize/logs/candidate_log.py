"""One rank's calls of the candidate, and which of them agree with the reference's: see `blame`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from bitproof.harness.localize.logs.calls import READS_OUT, Call, Place, gives_what_it_reads, is_abandoned
from bitproof.harness.localize.logs.packing import CONSTANTS, PACKING, keeps_order, name_of
from bitproof.harness.localize.logs.reference_log import IndexedLog, ReferenceLog, fits, values_of

RECOMPUTED = "_recomputed"
"""Part of the name of a node that repeats another one: see `harness.graph.passes.rematerialize`."""


class CandidateLog(IndexedLog):
    """One rank's calls, and which of them agree with the reference's."""

    def __init__(self, calls: Sequence[Call], reference: ReferenceLog) -> None:
        super().__init__(calls)
        self.reference = reference
        self.values = {value for call in calls for value in (*call.inputs, *call.outputs, *call.aliases)}
        self._made = {(call.operator, call.outputs) for call in calls}
        self._num_giving = Counter((c.operator, values_of(c), c.place) for c in calls if not gives_what_it_reads(c))
        once = (call for call in calls if not is_again(call))
        self._num_made, self._num_due = (
            Counter(x for call in log for x in _kinds(call)) for log in (once, reference.log)
        )
        self._agrees = [
            reference.knows(call)
            or (reference.values.issuperset(call.outputs) and self.changes_nothing(index))
            or self._comes_to_what_is_due(call)
            for index, call in enumerate(calls)
        ]
        self._latest: dict[str, int] = {}
        self._num_givers = Counter[str]()
        self._read_out: int | None = None
        self.trusts_parts = True
        self._bad: list[tuple[int, ...]] = []
        self._unpacked: list[set[int]] = []
        self._given: list[tuple[int | None, ...]] = []
        for index, call in enumerate(calls):
            self._judge(index, call)
            for value in (*call.aliases, *call.outputs):
                self._latest[value] = index
                self._num_givers[value] += 1

    def _judge(self, index: int, call: Call) -> None:
        """Note who gave what a call reads, and whether it agrees; those before it were judged."""
        given = self._givers(call)
        found = [giver for giver in given if giver is not None]
        self._given.append(given)
        right = self.reference.values
        unpacked = {i for i in found if self._unpacks(i) and set(self.log[i].outputs) & set(call.inputs) <= right}
        self._unpacked.append(unpacked)
        if is_abandoned(call) or self._shows_what_is_wrong(index, found):
            self._agrees[index] = False
        elif self._keeps_what_it_reads(call):
            self._agrees[index] = all(self._agrees[i] or i in unpacked for i in found)
        numbers = self._numbers(call)
        self._given[-1] += numbers
        self._bad.append(tuple(i for i in (*found, *numbers) if not self._agrees[i]))
        is_fed_wrong = bool(self._bad[index]) or not right.issuperset(call.inputs)
        if call.operator == READS_OUT and not self._agrees[index] and is_fed_wrong:
            self._read_out = index

    def _givers(self, call: Call) -> tuple[int | None, ...]:
        """The call that gave each input: the one that left it in its memory, or the last that gave such a value.

        A right value that no call left where it is read has no source here: it was there before the step.
        """
        producers = call.producers or (None,) * len(call.inputs)
        right = self.reference.values if call.producers else ()
        own = (
            self._latest.get(value) if producer is None and value not in right else producer
            for value, producer in zip(call.inputs, producers, strict=False)
        )
        return (*own, *producers[len(call.inputs) :])

    def _numbers(self, call: Call) -> tuple[int, ...]:
        """The last call that read a number out of a wrong tensor, for one of the update that is given other numbers.

        So a step count reaches what it corrects. In forward, counts of rows are read out all the time.
        """
        read_out = self._read_out
        if read_out is None or {self.log[read_out].place.direction, call.place.direction} != {"update"}:
            return ()
        is_given_others = bool(self.reference.alike(call)) and not self.reference.makes(call)
        return (read_out,) if is_given_others else ()

    def is_proven(self, index: int) -> bool:
        """Whether the reference makes this very call, of the same inputs, and here it gives what that has nowhere.

        A copy needs none to compare with. One too many, or of another module, may read the same, with other numbers.
        """
        call = self.log[index]
        if not call.inputs or self.reference.values.issuperset(call.outputs):
            return False
        if call.operator == "clone":
            return self.reference.values.issuperset(call.inputs)
        partner, same = self.reference.partner(call, 0)
        if partner is None or same != "computes":
            return False
        if self.reference.makes(call):
            return True
        is_there = (
            None in (modules := {call.place.module, self.reference.log[partner].place.module}) or len(modules) < 2
        )
        return is_there and not self.is_extra(index)

    def last_producer(self, wanted: str, digest: str) -> int | None:
        """The call that gave a record its value, unless it agrees, and what it reads too.

        A sum without one of its summands is a right value as well: the sum so far.
        """
        index = self.giver(wanted, digest)
        return None if index is None or (self._agrees[index] and not self.bad_producers(index)) else index

    def new_constant(self, index: int, partner: int | None) -> int | None:
        """A new call that made, of nothing, an input that a call's partner does not have; None where there is none."""
        call, theirs = self.log[index], self.reference.log[partner].inputs if partner is not None else ()
        odd = [i for x, i in zip(call.inputs, call.producers, strict=False) if x not in theirs and i is not None]
        return next((i for i in odd if self.is_new(i) and name_of(self.log[i]) in CONSTANTS), None)

    def bad_producers(self, index: int) -> set[int]:
        """The calls that gave a call's inputs and do not agree."""
        found, pending = set(), self._bad_inputs(index)
        while pending:
            producer = pending.pop()
            view = self.log[producer]
            is_for_it = self.is_new(index) and self.log[index].operator != "clone"  # in which no value is wrong
            is_passed = (is_for_it and not self.is_proven(producer)) or keeps_order(view)
            is_there = view.place == self.log[index].place or self.is_extra(
                producer
            )  # else the reference has this view
            if view.view and (is_passed or (is_there and self.shows_left(producer))):
                pending += self._bad_inputs(producer)
            else:
                found.add(producer)
        return found

    def _shows_for(self, view: int, index: int) -> bool:
        """Whether a view shows a call what was there before the step: at its place, or where the reference has none."""
        is_there = self.log[view].place == self.log[index].place or self.is_extra(view)
        return is_there and self.shows_left(view)

    def _bad_inputs(self, index: int) -> list[int]:
        """The same, views included; a right part of a bucket is right, where it is trusted, wherever it belongs."""
        unpacked = self._unpacked[index] if self.trusts_parts else ()
        return [producer for producer in self._bad[index] if producer not in unpacked]

    def how_it_reads(self, index: int) -> Literal["reads", "inherits", "draws"]:
        """What is wrong with a call that reads other inputs than its partner: nothing is called right unseen."""
        call = self.log[index]
        if not call.inputs:
            return "draws"
        return "inherits" if self._reads_left(index) else "reads"

    def _reads_left(self, index: int) -> bool:
        """Whether a call reads, be it by views, a value that the reference does not have and no call gave."""
        return any(
            value not in self.reference.values if giver is None else self.shows_left(giver)
            for value, giver in zip(self.log[index].inputs, self._given[index], strict=False)
        )

    def shows_left(self, index: int) -> bool:
        """Whether a call is a view of such a value, which computes nothing: what reads it is the first that does."""
        return self.log[index].view and self._reads_left(index)

    def giver(self, wanted: str, digest: str) -> int | None:
        """The call that gave a record its value: the last that did so, or the one that is where `wanted` was given."""
        known = self.reference.producer(wanted)
        if known is not None and self._num_givers[digest] > 1:
            due = self.reference.log[known]
            own = {each.inputs for each in map(self.reference.log.__getitem__, self.reference.there(due))}
            there = [i for i in self.there(due) if digest in self.log[i].outputs]
            there = [i for i in there if self.log[i].inputs not in own or self.log[i].inputs == due.inputs]
            if there:
                return there[-1]
        return self._latest.get(digest)

    def given(self, index: int) -> Sequence[int | None]:
        """The call that gave each of a call's inputs; None for what was there before the step."""
        return self._given[index]

    def givers(self, index: int) -> list[int]:
        """The calls that gave a call's inputs, right or not."""
        return [giver for giver in self._given[index] if giver is not None]

    def wired_alike(self, index: int, partner: int) -> Iterator[tuple[int, int]]:
        """What gave a call's inputs that its partner does not read, and what that reads: calls of the same turn."""
        sides = zip(self.log[index].inputs, self._given[index], strict=False)
        theirs = zip(self.reference.log[partner].inputs, self.reference.given(partner), strict=False)
        for (mine, made), (wanted, due) in zip(sides, theirs, strict=False):
            if mine == wanted or made is None or due is None:
                continue
            if self.reference.counterpart(due, self) == made:
                yield made, due

    def differs(self, index: int) -> bool:
        """Whether a call does not agree."""
        return not self._agrees[index]

    def lacks(self, index: int) -> bool:
        """Whether no call here gives what this call of the reference gives."""
        return self.values.isdisjoint(self.reference.log[index].outputs)

    def exchanges(self, index: int) -> bool:
        """Whether a call reads right values in another order than the reference's, and gives another one."""
        call = self.log[index]
        is_right = len(call.inputs) > 1 and self.reads_right_values(index)
        same = self.reference.partner(call, self.turn(index))[1] if is_right else None
        return same == "exchanges" and not self.reference.values.issuperset(call.outputs)

    def reads_right_values(self, index: int) -> bool:
        """Whether the reference has all that a call reads somewhere."""
        return self.reference.values.issuperset(self.log[index].inputs)

    def has(self, values: Iterable[str]) -> bool:
        """Whether all of these values are somewhere here."""
        return self.values.issuperset(values)

    def packs(self, index: int) -> bool:
        """Whether a call computes nothing: it puts values together, or takes them apart."""
        return self.log[index].view or name_of(self.log[index]) in PACKING or self.changes_nothing(index)

    def _unpacks(self, index: int) -> bool:
        """Whether a call takes apart a bucket that the reference has nowhere: then its parts count each by itself.

        What was computed is no bucket: a wrong tensor may well have right parts, or fill a right one.
        """
        return self.packs(index) and self.bucket_of(index) is not None

    def _shows_what_is_wrong(self, index: int, given: Sequence[int]) -> bool:
        """Whether a view is of a tensor that was computed wrong: what it shows of that is right by chance."""
        is_own = self.log[index].view and self.reference.values.isdisjoint(self.log[index].inputs)
        pending = [i for i in given if not self._agrees[i]] if is_own and self.bucket_of(index) is None else []
        for i in pending:
            if not self.packs(i) or self.is_wrong(i):
                return True
            pending += self._bad[i] if self.log[i].view else ()
        return False

    def bucket_of(self, index: int) -> int | None:
        """The collective of the bucket that all of what a call reads are parts of; None where there is none."""
        launches, pending, seen = set[int | None](), list(self._packed_by(index)), set[int | None]()
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            if number is None or self.log[number].collective or not self.packs(number):
                launches.add(number)
            else:
                pending += self._packed_by(number)
        launch = launches.pop() if len(launches) == 1 else None
        if launch is None or not self.log[launch].collective:
            return None
        is_packed = not any(self.log[giver].collective for giver in self.givers(launch))
        return launch if is_packed and not self.reference.alike(self.log[launch]) else None

    def _packed_by(self, index: int) -> Sequence[int | None]:
        """The calls whose values a call puts together or takes apart; what `copy_` writes over is none of them."""
        return self._given[index][1:] if name_of(self.log[index]) == "copy_" else self._given[index]

    def only_packs(self, index: int) -> bool:
        """Whether a call puts right values together and computes nothing, as far as it is known by its operator.

        One that the reference makes of the same values and that gives another is wrong in itself; so is one that reads
        another value than the call of the reference that it stands for.
        """
        packs = name_of(self.log[index]) in PACKING and not self.is_wrong(index)
        return packs and all(map(self.only_packs, self.bad_producers(index)))

    def is_wrong(self, index: int) -> bool:
        """Whether a call is wrong in itself, whatever it packs: in what it gives or reads, or in which order."""
        return self.is_proven(index) or self.exchanges(index) or self.stands_for(index) is not None

    def stands_for(self, index: int) -> int | None:
        """The call of the reference that this log makes nowhere, and that a call reads most, but not all, inputs of."""
        call = self.log[index]
        for other in self.reference.could_be(call):
            known = self.reference.log[other]
            num_other = (Counter(call.inputs) - Counter(known.inputs)).total()
            is_alike = len(call.inputs) == len(known.inputs) and 0 < num_other <= len(call.inputs) / 2
            if is_alike and (known.operator, known.outputs) not in self._made:
                return other
        return None

    def wrongly_packed(self, index: int) -> int | None:
        """The first call that reads another value than it should and that packed what a call reads a part of."""
        pending, found = list(self._bad[index]), list[int]()
        while pending:
            number = pending.pop()
            if self.stands_for(number) is not None:
                found.append(number)
            elif self.packs(number):
                pending += self._bad[number]
        return min(found, default=None)

    def packers(self, index: int) -> list[int]:
        """The calls that put together, or take apart, what fills a bucket of a collective."""
        pending, found = list(self.givers(index)), set[int]()
        while pending:
            number = pending.pop()
            if number not in found and self.packs(number) and not self.log[number].collective:
                found.add(number)
                pending += self.givers(number)
        return sorted(found)

    def is_packing(self, index: int) -> bool:
        """Whether a call only packs right values, or is the collective of such."""
        earlier = self.bad_producers(index)
        return self.only_packs(index) or (bool(earlier) and all(map(self.only_packs, earlier)))

    def _keeps_what_it_reads(self, call: Call) -> bool:
        """Whether a call copies a right value that the reference copies nowhere: no value in it can be wrong."""
        is_right = self.reference.values.issuperset((*call.inputs, *call.outputs))
        return call.operator == "clone" and is_right and not self.reference.gives(call)

    def is_new(self, index: int) -> bool:
        """Whether the reference never calls such an operator there."""
        return not self.reference.calls(self.log[index])

    def changes_nothing(self, index: int) -> bool:
        """Whether a call that the reference does not make gives a value that it reads, as a product with 1 does."""
        call = self.log[index]
        return (
            gives_what_it_reads(call)
            and not call.collective
            and (self.is_extra(index) or not self._may_stand_for_another(call))
        )

    def _may_stand_for_another(self, call: Call) -> bool:
        """Whether the reference makes one of its inputs, or one there that gives what it reads or what is lost."""
        due = [(index, self.reference.log[index]) for index in self.reference.could_be(call)]
        kept = (set(known.outputs) <= set(known.inputs) for _, known in due)
        lost = (self.lacks(index) and len(known.inputs) == len(call.inputs) for index, known in due)
        return bool(self.reference.alike(call)) or any(kept) or any(lost)

    def _comes_to_what_is_due(self, call: Call) -> bool:
        """Whether a call gives, by another way, what a call of the reference gives there that is not made here."""
        if call.collective or not call.inputs:
            return False
        values = values_of(call)
        return any(
            sum(self._num_giving[operator, values, place] for place in {*places, Place(None, None)}) < num
            for operator, places, num in self.reference.giving(call)
            if call.place in places or (call.place.module is None and any(fits(x, call.place) for x in places))
        )

    def is_extra(self, index: int) -> bool:
        """Whether more calls of its operator are made in its module than the reference makes, in either chunk.

        What adds two chunks runs once here, and there as chunk 0's or chunk 1's. What is computed again does not count.
        """
        if is_again(self.log[index]):
            return False
        everywhere, there = _kinds(self.log[index])
        kind = everywhere if self.log[index].place.direction is None else there
        return self._num_made[kind] > self._num_due[kind]

    def repeated_by(self, index: int) -> int | None:
        """The call that one repeats which backward computes again, by the names of their nodes."""
        call = self.log[index]
        if not is_again(call):
            return None
        first = str(call.node).replace(RECOMPUTED, "")
        return next((number for number, known in enumerate(self.log) if known.node == first), None)

    def is_turn(self, index: int, call: Call, turn: int) -> bool:
        """Whether a call is the turn-th of the same operator at the same place as another rank's `call`."""
        return index in self.there(call) and self.turn(index) == turn


def _kinds(call: Call) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """What a call is one of: the calls of its operator, and those in its module and direction."""
    return (call.operator,), (call.operator, call.place.module, call.place.direction)


def is_again(call: Call) -> bool:
    """Whether a call is one that backward computes again."""
    return call.node is not None and RECOMPUTED in call.node
