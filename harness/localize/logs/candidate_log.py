"""A rank's calls of the candidate, each judged by the reference's log: right or wrong (see `blame`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from bitproof.harness.localize.logs.calls import READS_OUT, Call, Place, gives_what_it_reads, is_abandoned
from bitproof.harness.localize.logs.packing import CONSTANTS, PACKING, keeps_order, name_of
from bitproof.harness.localize.logs.reference_log import IndexedLog, ReferenceLog, fits, values_of

RECOMPUTED = "_recomputed"
"""The part of a node's name that marks a recomputed node: see `harness.graph.passes.rematerialize`."""


class CandidateLog(IndexedLog):
    """A rank's calls, each judged by the reference's log.

    A call agrees if the reference has its outputs at a fitting place, if it changes nothing, or if it reaches a value
    of the reference in another way. Calls are judged in order: a view, for example, agrees only if its tensor does.
    """

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
        # At first each call is judged by its own values; `_judge` corrects this by its producers.
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
        """Find a call's producers, and correct the call's judgement by whether they are right.

        Earlier calls are judged already.
        """
        given = self._givers(call)
        found = [giver for giver in given if giver is not None]
        self._given.append(given)
        right = self.reference.values
        # Right parts of a bucket are right, although the reference does not have the bucket.
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
        """The producer of each input: the call that wrote it into memory, or else the last call with an equal output.

        A right value that no call wrote into its memory has no producer: it is from before the step.
        """
        producers = call.producers or (None,) * len(call.inputs)
        right = self.reference.values if call.producers else ()
        own = (
            self._latest.get(value) if producer is None and value not in right else producer
            for value, producer in zip(call.inputs, producers, strict=False)
        )
        return (*own, *producers[len(call.inputs) :])

    def _numbers(self, call: Call) -> tuple[int, ...]:
        """The last call that read a number out of a wrong tensor, if this call may have got that number; else empty.

        Both must be calls of the update, and this call's numbers must differ from the reference's. Numbers pass through
        Python, which no log shows. Example: a wrong step count reaches Adam's bias correction. Forward and backward
        are left out, as a forward reads many numbers, such as counts of rows.
        """
        read_out = self._read_out
        if read_out is None or {self.log[read_out].place.direction, call.place.direction} != {"update"}:
            return ()
        is_given_others = bool(self.reference.alike(call)) and not self.reference.makes(call)
        return (read_out,) if is_given_others else ()

    def is_proven(self, index: int) -> bool:
        """Whether a call is certainly wrong: the reference has a call with the same inputs, but this output nowhere.

        - A `clone` needs no such call: the copy of a right value must be right.
        - If the numbers differ, an extra call, or a call in another module, may just happen to have the same inputs:
          then it is not certain.
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
        """The producer of a record's value; None if it agrees and has no wrong input.

        A producer with a right output may still be wrong for the record: a sum that lacks a summand is the right value
        of the sum so far.
        """
        index = self.giver(wanted, digest)
        return None if index is None or (self._agrees[index] and not self.bad_producers(index)) else index

    def new_constant(self, index: int, partner: int | None) -> int | None:
        """The call that made a constant input of call `index`, such as `zeros`, if the reference lacks this input.

        The reference lacks an input if its call `partner` has no equal input, or if there is no partner. Only operators
        that the reference never uses in the call's direction count. None if no input is such a constant.
        """
        call, theirs = self.log[index], self.reference.log[partner].inputs if partner is not None else ()
        odd = [i for x, i in zip(call.inputs, call.producers, strict=False) if x not in theirs and i is not None]
        return next((i for i in odd if self.is_new(i) and name_of(self.log[i]) in CONSTANTS), None)

    def bad_producers(self, index: int) -> set[int]:
        """The wrong producers of a call's inputs. A view that the reference need not have is passed over.

        The wrong producers of the view's own input take its place.
        """
        found, pending = set(), self._bad_inputs(index)
        while pending:
            producer = pending.pop()
            view = self.log[producer]
            # A clone's values cannot be wrong.
            is_for_it = self.is_new(index) and self.log[index].operator != "clone"
            is_passed = (is_for_it and not self.is_proven(producer)) or keeps_order(view)
            # A view at another place, unless it is extra, is one that the reference has too.
            is_there = view.place == self.log[index].place or self.is_extra(producer)
            # A view computes nothing, so the wrong value comes from its input.
            if view.view and (is_passed or (is_there and self.shows_left(producer))):
                pending += self._bad_inputs(producer)
            else:
                found.add(producer)
        return found

    def _bad_inputs(self, index: int) -> list[int]:
        """The wrong producers of a call's inputs, views included.

        While `trusts_parts`, a bucket is not wrong if the parts that the call takes from it are right.
        """
        unpacked = self._unpacked[index] if self.trusts_parts else ()
        return [producer for producer in self._bad[index] if producer not in unpacked]

    def how_it_reads(self, index: int) -> Literal["reads", "inherits", "draws"]:
        """The defect of a call with other inputs than its partner's: "draws" without inputs, "inherits" if it reads a
        value from before the step, else "reads".
        """
        call = self.log[index]
        if not call.inputs:
            return "draws"
        return "inherits" if self._reads_left(index) else "reads"

    def how_it_came(self, index: int, known: Sequence[str] = ()) -> Literal["unwritten", "outside"] | None:
        """The defect of a call that reads, directly or through views, an input that no call wrote.

        It is "unwritten" if the input is uninitialized memory, and "outside" if something else than a call wrote memory
        of this step. Inputs with a value among `known` do not count. None if a call wrote every other input.
        """
        for position, (value, giver) in enumerate(zip(self.log[index].inputs, self._given[index], strict=False)):
            if value in known:
                continue
            call, at = self.log[index], position
            while giver is not None and self.log[giver].view and self.log[giver].inputs:
                call, at, giver = self.log[giver], 0, self._given[giver][0]
            if at in call.unwritten:
                return "unwritten"
            if at in call.outside:
                return "outside"
        return None

    def reads_unwritten(self, index: int) -> bool:
        """Whether a call reads uninitialized memory."""
        return self.how_it_came(index) == "unwritten"

    def _reads_left(self, index: int) -> bool:
        """Whether a call reads, directly or through views, a value that no call produced and the reference never has.

        For example, a stale value from before the step.
        """
        return any(
            value not in self.reference.values if giver is None else self.shows_left(giver)
            for value, giver in zip(self.log[index].inputs, self._given[index], strict=False)
        )

    def shows_left(self, index: int) -> bool:
        """Whether a call is a view of such a stale value. It computes nothing, so its reader is blamed instead."""
        return self.log[index].view and self._reads_left(index)

    def giver(self, wanted: str, digest: str) -> int | None:
        """The call that produced a record's value `digest`; None if no call did.

        Several calls may have produced that value: every expert without rows has gradients of zeros. Then it is the
        last of them at the place where the reference produced the record's value `wanted`, or else the last anywhere.
        """
        known = self.reference.producer(wanted)
        if known is not None and self._num_givers[digest] > 1:
            due = self.reference.log[known]
            # The reference may make several calls there. A call here with the inputs of another of them is that other
            # call's counterpart, and not the producer of this record.
            own = {each.inputs for each in map(self.reference.log.__getitem__, self.reference.there(due))}
            there = [i for i in self.there(due) if digest in self.log[i].outputs]
            there = [i for i in there if self.log[i].inputs not in own or self.log[i].inputs == due.inputs]
            if there:
                return there[-1]
        return self._latest.get(digest)

    def given(self, index: int) -> Sequence[int | None]:
        """The producer of each input of a call; None for values from before the step."""
        return self._given[index]

    def givers(self, index: int) -> list[int]:
        """The producers of a call's inputs, right or wrong."""
        return [giver for giver in self._given[index] if giver is not None]

    def wired_alike(self, index: int, partner: int) -> Iterator[tuple[int, int]]:
        """For each input that differs from the partner's: the producers, here and in the reference.

        Left out are pairs that are not the same occurrence of the same operator at the same place.
        """
        sides = zip(self.log[index].inputs, self._given[index], strict=False)
        theirs = zip(self.reference.log[partner].inputs, self.reference.given(partner), strict=False)
        for (mine, made), (wanted, due) in zip(sides, theirs, strict=False):
            if mine == wanted or made is None or due is None:
                continue
            if self.reference.counterpart(due, self) == made:
                yield made, due

    def differs(self, index: int) -> bool:
        """Whether a call is wrong."""
        return not self._agrees[index]

    def lacks(self, index: int) -> bool:
        """Whether the candidate has no output of the reference's call `index` anywhere."""
        return self.values.isdisjoint(self.reference.log[index].outputs)

    def exchanges(self, index: int) -> bool:
        """Whether a call reads right values in another order than the reference, with a different output."""
        call = self.log[index]
        is_right = len(call.inputs) > 1 and self.reads_right_values(index)
        same = self.reference.partner(call, self.turn(index))[1] if is_right else None
        return same == "exchanges" and not self.reference.values.issuperset(call.outputs)

    def reads_right_values(self, index: int) -> bool:
        """Whether the reference has all inputs of a call somewhere."""
        return self.reference.values.issuperset(self.log[index].inputs)

    def has(self, values: Iterable[str]) -> bool:
        """Whether the candidate has all of these values somewhere."""
        return self.values.issuperset(values)

    def packs(self, index: int) -> bool:
        """Whether a call computes nothing: it joins values, takes them apart, or returns an input unchanged."""
        return self.log[index].view or name_of(self.log[index]) in PACKING or self.changes_nothing(index)

    def _unpacks(self, index: int) -> bool:
        """Whether a call takes apart a bucket that only the candidate has, so that its parts are judged separately.

        A computed tensor is no bucket: a wrong tensor may well have right parts.
        """
        return self.packs(index) and self.bucket_of(index) is not None

    def _shows_what_is_wrong(self, index: int, given: Sequence[int]) -> bool:
        """Whether a call is a view of a wrong computed tensor. If such a view has a right value, this is by chance."""
        # Go back over wrong producers, as long as these are views, to a call that computes or is wrong itself.
        is_own = self.log[index].view and self.reference.values.isdisjoint(self.log[index].inputs)
        pending = [i for i in given if not self._agrees[i]] if is_own and self.bucket_of(index) is None else []
        for i in pending:
            if not self.packs(i) or self.is_wrong(i):
                return True
            pending += self._bad[i] if self.log[i].view else ()
        return False

    def bucket_of(self, index: int) -> int | None:
        """The collective of the bucket from which all inputs of a call come; None if there is none.

        A bucket is the result of a collective of packed values that the reference does not have.
        """
        # Go back over packing to the calls that computed the packed values. A bucket has a single one: its collective.
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
        # A collective of another collective's result is no bucket: nothing was packed for it.
        is_packed = not any(self.log[giver].collective for giver in self.givers(launch))
        return launch if is_packed and not self.reference.alike(self.log[launch]) else None

    def _packed_by(self, index: int) -> Sequence[int | None]:
        """The producers of the values that a call packs: for `copy_` without the tensor that it overwrites."""
        return self._given[index][1:] if name_of(self.log[index]) == "copy_" else self._given[index]

    def only_packs(self, index: int) -> bool:
        """Whether a call, and every wrong producer before it, packs and is not wrong itself.

        So all values that it packs are right.
        """
        packs = name_of(self.log[index]) in PACKING and not self.is_wrong(index)
        return packs and all(map(self.only_packs, self.bad_producers(index)))

    def is_wrong(self, index: int) -> bool:
        """Whether a call is wrong itself: by its output, by the order of its inputs, or by a few of them."""
        return self.is_proven(index) or self.exchanges(index) or self.stands_for(index) is not None

    def stands_for(self, index: int) -> int | None:
        """The reference's call in whose place the candidate makes this call with a few wrong inputs; None if none.

        The two calls share at least half, but not all, of their inputs, and the reference's output is nowhere in the
        candidate. For example, `cat a b d` is in the place of `cat a b c`.
        """
        call = self.log[index]
        for other in self.reference.could_be(call):
            known = self.reference.log[other]
            num_other = (Counter(call.inputs) - Counter(known.inputs)).total()
            is_alike = len(call.inputs) == len(known.inputs) and 0 < num_other <= len(call.inputs) / 2
            if is_alike and (known.operator, known.outputs) not in self._made:
                return other
        return None

    def wrongly_packed(self, index: int) -> int | None:
        """The first call that packed a wrong value into an input of the call `index`; None if there is none."""
        pending, found = list(self._bad[index]), list[int]()
        while pending:
            number = pending.pop()
            if self.stands_for(number) is not None:
                found.append(number)
            elif self.packs(number):
                pending += self._bad[number]
        return min(found, default=None)

    def packers(self, index: int) -> list[int]:
        """The calls that pack the inputs of a collective."""
        pending, found = list(self.givers(index)), set[int]()
        while pending:
            number = pending.pop()
            if number not in found and self.packs(number) and not self.log[number].collective:
                found.add(number)
                pending += self.givers(number)
        return sorted(found)

    def is_packing(self, index: int) -> bool:
        """Whether a call only packs right values, or all of its wrong inputs are such packs."""
        earlier = self.bad_producers(index)
        return self.only_packs(index) or (bool(earlier) and all(map(self.only_packs, earlier)))

    def _keeps_what_it_reads(self, call: Call) -> bool:
        """Whether a call clones a right value that the reference does not clone: it is as right as its input."""
        is_right = self.reference.values.issuperset((*call.inputs, *call.outputs))
        return call.operator == "clone" and is_right and not self.reference.gives(call)

    def is_new(self, index: int) -> bool:
        """Whether the reference never uses the call's operator in its direction."""
        return not self.reference.calls(self.log[index])

    def changes_nothing(self, index: int) -> bool:
        """Whether an extra call returns an input unchanged, such as a product with 1."""
        call = self.log[index]
        return (
            gives_what_it_reads(call)
            and not call.collective
            and (self.is_extra(index) or not self._may_stand_for_another(call))
        )

    def _may_stand_for_another(self, call: Call) -> bool:
        """Whether a call that returns an input may replace a call of the reference.

        It may if the reference has a call of this operator with the same inputs. It also may if the reference has a
        call of this operator at this place that returns an input as well, or whose output is missing here.
        """
        due = [(index, self.reference.log[index]) for index in self.reference.could_be(call)]
        kept = (set(known.outputs) <= set(known.inputs) for _, known in due)
        lost = (self.lacks(index) and len(known.inputs) == len(call.inputs) for index, known in due)
        return bool(self.reference.alike(call)) or any(kept) or any(lost)

    def _comes_to_what_is_due(self, call: Call) -> bool:
        """Whether a call has the outputs of a missing call, of any operator, that the reference makes at this place.

        For example, `mul h 0.5` for the reference's `div h 2`.
        """
        if call.collective or not call.inputs:
            return False
        values = values_of(call)
        # Count calls with these outputs at all places of the reference's calls, and without a place. If there are as
        # many as in the reference, none is missing, and this call replaces none.
        return any(
            sum(self._num_giving[operator, values, place] for place in {*places, Place(None, None)}) < num
            for operator, places, num in self.reference.giving(call)
            if call.place in places or (call.place.module is None and any(fits(x, call.place) for x in places))
        )

    def is_extra(self, index: int) -> bool:
        """Whether the candidate makes more calls of this operator in this module and direction than the reference.

        Both chunks count together, since a call that adds them may be unchunked on either side. Recomputed calls do not
        count. If the direction is unknown, calls of the operator anywhere count.
        """
        if is_again(self.log[index]):
            return False
        everywhere, there = _kinds(self.log[index])
        kind = everywhere if self.log[index].place.direction is None else there
        return self._num_made[kind] > self._num_due[kind]

    def repeated_by(self, index: int) -> int | None:
        """The call of forward that a recomputed call repeats, by the names of their nodes; None for other calls."""
        call = self.log[index]
        if not is_again(call):
            return None
        first = str(call.node).replace(RECOMPUTED, "")
        return next((number for number, known in enumerate(self.log) if known.node == first), None)

    def is_turn(self, index: int, call: Call, turn: int) -> bool:
        """Whether a call has the operator, the place and the occurrence (`turn`) of another rank's `call`."""
        return index in self.there(call) and self.turn(index) == turn


def _kinds(call: Call) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Two keys to count a call by: its operator, and its operator in its module and direction."""
    return (call.operator,), (call.operator, call.place.module, call.place.direction)


def is_again(call: Call) -> bool:
    """Whether backward recomputes the call of forward."""
    return call.node is not None and RECOMPUTED in call.node
