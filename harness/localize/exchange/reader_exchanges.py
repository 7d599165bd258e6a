"""Plan exchanges at the readers of a wrong call whose own output has no counterpart in the other system.

1. An extra call's output becomes the value that the match of its reader reads. If a reader is extra too, its own
   readers are used.
2. A missing call's output is given to the calls that should read it.
3. Behind a missing cast, values have another dtype. The exchange is at the first input or output that has the dtype of
   the reference's value:

    reference    cast x -> y    mm y w -> a    cast a -> b    sum b -> l
    candidate                   mm x v -> A                   sum A -> L        sum reads b in place of A

In all functions, `mine` is the index of a call, or the site of a value, in the candidate's log. `theirs` is the
matching index or site in the reference's log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.exchange.misreads import Misread
from bitproof.harness.localize.logs.calls import OPAQUE, Call, producer_of
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE, ReferenceLog
from bitproof.harness.localize.logs.replay import ValueSite, value_at

MAX_NEW_CALLS = 12
"""The maximum number of new calls in a row between a blamed call and a reader with a matching call."""


class Swap(NamedTuple):
    """An exchange: a value of a system is replaced by a value of the other.

    - `site`, `found`: the site and the digest of the replaced value.
    - `value`, `wanted`: the site and the digest of the inserted value, in the other system.
    - `reads`: exchange only if the call's inputs have these digests when it runs; None for any inputs.
    """

    site: ValueSite
    value: ValueSite
    operator: str
    found: str
    wanted: str
    reads: tuple[str, ...] | None = None
    in_place: bool = False


@dataclass
class Draft:
    """The exchanges for a call, while they are collected."""

    candidate: list[Swap] = field(default_factory=list)
    reference: list[Swap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, other: Draft) -> None:
        """Add the exchanges of another call."""
        self.candidate += other.candidate
        self.reference += other.reference
        self.problems += other.problems


class MessageReceives:
    """Finds the calls that receive the candidate's messages."""

    def __init__(self, logs: Sequence[CandidateLog]) -> None:
        self._logs = logs

    @cached_property
    def _joined(self) -> JoinedLogs:
        return JoinedLogs([log.log for log in self._logs])

    def receive_of(self, rank: int, send: int) -> tuple[int, int, int] | None:
        """Return the call that receives the message of a send, as (rank, index in the candidate's log, in the
        reference's); None if there is none, or the reference makes no such call.

        `send` is the index of the sending call in the candidate's log of `rank`.
        """
        for peer, index in self._joined.together((rank, send)):
            if peer != rank and (theirs := self._logs[peer].matching_call(index)) is not None:
                return peer, index, theirs
        return None

    def log_of(self, rank: int) -> CandidateLog:
        """Return a rank's log."""
        return self._logs[rank]


class ReaderExchanges:
    """Plans exchanges at the calls that read the output of a wrong call, in both logs of a rank.

    - `pairs`: the two digests of each differing record of the rank.
    - `types`: the dtype and shape of each digest, as far as they are known.
    - `passed`: calls whose outputs cannot be exchanged. Their readers are used instead.
    """

    def __init__(
        self,
        log: CandidateLog,
        rank: int,
        pairs: Sequence[Pair],
        blocked: Collection[ValueSite],
        messages: MessageReceives,
        types: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log, self.rank, self.pairs, self.messages, self.types = log, rank, pairs, messages, types
        self.blocked = {site.call for site in blocked if site.rank == rank and not site.is_input}
        self.blocked_inputs = {site for site in blocked if site.is_input}
        self.passed = set[int]()
        self._planned: dict[tuple[str, int], int] = {}

    def _is_planned(self, side: str, index: int, depth: int) -> bool:
        """Whether a call was already planned, at this depth or a smaller one. Also notes that it is planned now.

        `depth` is the number of calls passed between the blamed call and this call.
        """
        known = self._planned.get((side, index), MAX_NEW_CALLS + 1)
        self._planned[side, index] = min(known, depth)
        return known <= depth

    def is_blocked(self, index: int) -> bool:
        """Whether a call's outputs cannot be exchanged with those of the matching call, because their dtypes or shapes
        differ.

        They differ according to the log, or because an exchange of them failed.
        """
        other = self.log.matching_call(index)
        due = self.log.reference.log[other].outputs if other is not None else ()
        pairs = zip(self.log.log[index].outputs, due, strict=False)
        return index in self.blocked or any(self._are_of_two_types(*pair) for pair in pairs)

    def may_take_outputs_of(self, mine: int, theirs: int) -> bool:
        """Whether the outputs of `mine` can be exchanged with those of its match `theirs`: number, dtypes and shapes
        are equal.

        For example, a `send` has no output, though a `broadcast` may match it.
        """
        is_alike = len(self.log.log[mine].outputs) == len(self.log.reference.log[theirs].outputs)
        return is_alike and not self.is_blocked(mine)

    def contradict(self, mine: int, theirs: int) -> bool:
        """Whether the match of two calls with different inputs or arguments is wrong by all readers: none of their
        matches reads an output of `theirs` there.
        """
        call, partner = self.log.log[mine], self.log.reference.log[theirs]
        if sorted(call.inputs) == sorted(partner.inputs) and call.scalars == partner.scalars:
            return False
        readers = [(self.log.matching_call(reader), at) for reader, at in self.log.readers(mine)]
        due = [self.log.reference.log[other].inputs[at : at + 1] for other, at in readers if other is not None]
        return bool(due) and all(set(partner.outputs).isdisjoint(wanted) for wanted in due)

    def of_new(self, index: int, depth: int = 0) -> Draft:
        """Return the exchanges for a call that only the candidate makes."""
        call, plan = self.log.log[index], Draft()
        if self._is_planned("candidate", index, depth):
            return plan
        if name_of(call) == "send":
            received = self.messages.receive_of(self.rank, index)
            return of_matching(self.messages.log_of(received[0]), *received) if received is not None else plan
        if self.is_blocked(index):
            return self._of_readers(index, depth)
        # Three collections, all by output: -1, -2, ... stand for aliases, and None for memory that several calls
        # wrote. `at_readers` has the exchanges at single readers, and `read_right` the outputs that some reader
        # needs unchanged. `due` has, for each output, the values that the matches of its readers read in its
        # place, with their sites.
        due: dict[int | None, dict[str, ValueSite]] = defaultdict(dict)
        at_readers, read_right = list[tuple[int | None, Swap]](), set[int | None]()
        for reader, position in self.log.readers(index):
            other = self.log.matching_call(reader)
            if other is None:
                continue
            inputs = self.log.reference.log[other].inputs
            if len(inputs) != len(self.log.log[reader].inputs):
                plan.problems.append(f"{self.log.log[reader]} takes another number of tensors than its matching call")
                continue
            at = _position_there(self.log.log[reader], self.log.reference.log[other], position)
            value, wanted = self.log.log[reader].inputs[position], inputs[at]
            output = _output_with(call, value)
            if value == wanted:
                read_right.add(output)
                continue
            due[output][wanted] = _source(self.log.reference, self.rank, other, at)
            pair = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, at, True)
            # An alias, or memory that several calls wrote, is overwritten in place: its later readers need
            # the right value too.
            is_written = output is not None and output >= 0
            at_readers.append((output, self._at_reader(*pair, in_place=not is_written)))
            plan.reference += self._at_readers_there(*pair, in_place=name_of(call).endswith("_"))
        # A record that shows an output of this call counts as a reader of it.
        # The reference's value is that of the first call with the record's digest.
        for wanted, held in self.pairs:
            made = next(iter(self.log.reference.all_with(wanted)), None)
            output = _output_with(call, held)
            if output is not None and made is not None:
                position = self.log.reference.log[made].outputs.index(wanted)
                due[output][wanted] = ValueSite(self.rank, made, position)
                site = ValueSite(self.rank, index, output)
                known = self.log.reference.log[made]
                swap = Swap(ValueSite(self.rank, made, position), site, known.operator, wanted, held)
                plan.reference.insert(0, swap)  # the record shows this memory as well
                plan.reference[1:] = [later._replace(found="") for later in plan.reference[1:]]
        # If all readers of an output need the same value, the output itself is exchanged; else each reader's own input.
        for output, values in due.items():
            # In the log, views of one part have one producer, so each reader is exchanged by itself.
            if output is None or len(values) > 1 or (output in read_right and call.view):
                plan.candidate += [swap for read, swap in at_readers if read == output]
                continue
            if output in read_right:  # another reader rightly reads this value: the reader of the wrong one is wrong
                plan.problems.append(f"{call} has the right output for another reader")
                continue
            [(wanted, source)] = values.items()
            site = ValueSite(self.rank, index, output)
            plan.candidate.append(Swap(site, source, call.operator, str(value_at(call, site)), wanted))
        # Only new calls read it: go on to their outputs.
        if not plan.candidate and not read_right and depth < MAX_NEW_CALLS:
            plan.add(self._of_readers(index, depth))
        if not plan.candidate and not plan.problems and not depth:
            plan.problems.append(f"no call that the reference has reads what {call} gives")
        return checked(plan)

    def of_left(self, index: int) -> Draft:
        """Return the exchanges for a call that reads a value that no call of the step computed.

        The call may read it directly or through views.
        """
        # First the wrong values, each with the right value of the matching call; then all calls that read them.
        wrong, pending, seen = dict[str, str](), [index], set[int]()
        while pending:
            call, given = self.log.log[number := pending.pop()], self.log.input_producers(number)
            seen.add(number)
            other = self.log.matching_call(number)
            due = self.log.reference.log[other].inputs if other is not None else ()
            for value, producer, wanted in zip(call.inputs, given, due, strict=False):
                if producer is None and value != wanted:
                    wrong[value] = wanted
                elif producer is not None and producer not in seen and self.log.log[producer].view:
                    pending.append(producer)
        plan = Draft()
        for reader, call in enumerate(self.log.log) if wrong else ():
            left = [position for position, value in enumerate(call.inputs) if value in wrong]
            left = [position for position in left if _is_left(self.log, reader, position)]
            other = self.log.matching_call(reader) if left else None
            if other is None:
                continue
            if call.draws:
                return Draft()  # a generator's state is no tensor that the call is given
            due = self.log.reference.log[other].inputs
            for position in left:
                if due[position : position + 1] == (wrong[call.inputs[position]],):
                    pair = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, position, True)
                    plan.candidate.append(self._at_reader(*pair))
                    plan.reference += self._at_readers_there(*pair)
        return checked(plan)

    def of_misread(self, read: Misread) -> Draft:
        """Return the exchanges for a single input that a call misreads."""
        mine = ValueSite(self.rank, read.mine, read.position, True)
        theirs = ValueSite(self.rank, read.theirs, read.there, True)
        if mine in self.blocked_inputs:
            return Draft()
        return checked(Draft([self._at_reader(mine, theirs)], self._at_readers_there(mine, theirs)))

    def _of_readers(self, index: int, depth: int) -> Draft:
        """Return the exchanges for all calls that read an output of call `index`, which cannot be exchanged itself.

        A reader's input is exchanged if the reference's value fits there, otherwise the reader's output. If neither
        fits, its own readers are used: without a cast, all calls up to the next cast have values of another dtype.
        """
        plan, pending, seen = Draft(), [index], set[int]()
        while pending:
            if (current := pending.pop(0)) in seen:
                continue
            seen.add(current)
            self.passed.add(current)
            plan.add(self._of_shown(current))
            for reader, position in self.log.readers(current):
                if (draft := self._of_fitting_input(reader, position)) is not None:
                    plan.add(draft)
                elif not self._reads_right_beside(reader):
                    plan.problems.append(f"{self.log.log[reader]} also reads another value that is wrong")
                elif self.is_blocked(reader):
                    pending.append(reader)
                else:
                    plan.add(self._of_reader(reader, depth))
            for reader in self.log.readers_of_parts(current):
                if self._reads_right_beside(reader):
                    plan.add(self._of_reader(reader, depth))
        if not plan.candidate and not plan.problems:
            plan.problems.append(f"no call that the reference has reads what {self.log.log[index]} gives")
        return _in_order(plan)

    def _of_reader(self, reader: int, depth: int) -> Draft:
        """Return the exchanges for the outputs of a call, or for its readers."""
        other = self.log.matching_call(reader)
        if other is not None and self.may_take_outputs_of(reader, other):
            return of_matching(self.log, self.rank, reader, other)
        return self.of_new(reader, depth + 1) if depth < MAX_NEW_CALLS else Draft()

    def _of_shown(self, index: int) -> Draft:
        """Return the exchanges for records that have an output of call `index`, if the reference's values fit there."""
        plan, call, reference = Draft(), self.log.log[index], self.log.reference
        for wanted, held in self.pairs:
            if held not in call.outputs:
                continue
            made = next(iter(reference.all_with(wanted)), None)
            if made is not None and self._is_of_one_type(held, wanted):
                here = ValueSite(self.rank, index, call.outputs.index(held))
                there = ValueSite(self.rank, made, reference.log[made].outputs.index(wanted))
                plan.candidate.append(Swap(here, there, call.operator, held, wanted))
                plan.reference.append(Swap(there, here, reference.log[made].operator, wanted, held))
        return plan

    def _of_fitting_input(self, reader: int, position: int) -> Draft | None:
        """Return the exchange of a call's input, without exchanges if it is right; None if no value fits there."""
        if (other := self.log.matching_call(reader)) is None:
            return None
        call, partner = self.log.log[reader], self.log.reference.log[other]
        if len(call.inputs) != len(partner.inputs):
            return None
        at = _position_there(call, partner, position)
        if (value := call.inputs[position]) == (wanted := partner.inputs[at]):
            return Draft()
        here, there = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, at, True)
        if here in self.blocked_inputs or not self._is_of_one_type(value, wanted):
            return None
        return Draft([self._at_reader(here, there)], self._at_readers_there(here, there))

    def _is_of_one_type(self, first: str, second: str) -> bool:
        """Whether two values are known to have the same dtype and shape."""
        return self.types.get(first) is not None and self.types.get(first) == self.types.get(second)

    def _reads_right_beside(self, reader: int) -> bool:
        """Whether all inputs of a call are right, apart from those that passed calls and new calls give.

        With a wrong other input, an exchange of the output would hide a second defect. An input is right if the
        matching call reads it; for a new call, if the reference has it. An input of another dtype is right if only a
        cast is missing before it: the calls that computed it read right inputs and have the arguments of their matches.
        """
        pending, seen = [reader], set[int]()
        while pending:
            if (current := pending.pop()) in seen:
                continue
            seen.add(current)
            call, other = self.log.log[current], self.log.matching_call(current)
            partner = self.log.reference.log[other] if other is not None else None
            if partner is not None and self.is_blocked(current) and call.scalars != partner.scalars:
                return False
            right = self.log.reference.values if partner is None else partner.inputs
            for position, (value, producer) in enumerate(
                zip(call.inputs, self.log.input_producers(current), strict=False)
            ):
                if value in right or producer in self.passed or self._is_of_new(producer):
                    continue
                if not self._is_of_other_type(current, position):
                    return False
                if self._is_uncast(current, position):
                    continue
                if producer is None or not self.is_blocked(producer):
                    return False
                pending.append(producer)
        return True

    def _is_uncast(self, reader: int, position: int) -> bool:
        """Whether the matching call reads the output of a missing call, such as a cast, and `reader` that call's
        input.
        """
        other, reference = self.log.matching_call(reader), self.log.reference
        makers = reference.input_producers(other)[position : position + 1] if other is not None else ()
        value = self.log.log[reader].inputs[position]
        return any(
            maker is not None and self.log.matching_here(maker) is None and value in reference.log[maker].inputs
            for maker in makers
        )

    def _is_of_other_type(self, reader: int, position: int) -> bool:
        """Whether an input has another dtype or shape than the matching call's, as far as that is known."""
        if ValueSite(self.rank, reader, position, True) in self.blocked_inputs:
            return True
        other = self.log.matching_call(reader)
        wanted = self.log.reference.log[other].inputs[position : position + 1] if other is not None else ()
        return any(self._are_of_two_types(self.log.log[reader].inputs[position], value) for value in wanted)

    def _are_of_two_types(self, first: str, second: str) -> bool:
        types = self.types.get(first), self.types.get(second)
        return None not in types and types[0] != types[1]

    def _is_of_new(self, index: int | None) -> bool:
        """Whether a value is computed of right values alone, by new calls and by calls that read what these give.
        `index` is the call that gives it.

        For example, a product row by row: new calls take the rows, and one product of a row may match the reference's
        product of the whole.
        """
        if index is None:
            return False
        log, pending, seen = self.log, [index], set[int]()
        while pending:
            if (current := pending.pop()) in seen:
                continue
            seen.add(current)
            other = log.matching_call(current)
            if other is not None and current != index and not log.differs(current):
                continue
            # A matching call is no new one, unless each input in which it differs is of a new call.
            differing = log.differing_inputs(current, other) if other is not None else ()
            makers = [log.input_producers(current)[at] if at is not None else None for at, _ in differing]
            if other is not None and not (
                makers and all(x is not None and log.matching_call(x) is None for x in makers)
            ):
                return False
            for value, producer in zip(log.log[current].inputs, log.input_producers(current), strict=False):
                if producer is not None:
                    pending.append(producer)
                elif value not in log.reference.values:
                    return False
        return True

    def of_missing(self, index: int, depth: int = 0) -> Draft:
        """Return the exchanges for a call that only the reference makes."""
        reference, plan = self.log.reference, Draft()
        if self._is_planned("reference", index, depth):
            return plan
        call = reference.log[index]
        in_place = name_of(call).endswith("_")
        for reader, position in reference.readers(index):
            mine = self.log.matching_here(reader)
            # The reader is missing too: search its own readers, if the candidate lacks its value as well.
            if mine is None:
                if depth < MAX_NEW_CALLS and self.log.lacks(reader):
                    plan.add(self.of_missing(reader, depth + 1))
                continue
            is_alike = len(self.log.log[mine].inputs) == len(reference.log[reader].inputs)
            at = _position_there(reference.log[reader], self.log.log[mine], position) if is_alike else position
            here, there = ValueSite(self.rank, mine, at, True), ValueSite(self.rank, reader, position, True)
            # The reader's input cannot be exchanged, so its output is.
            if not is_alike or self._is_of_other_type(mine, at):
                if self.may_take_outputs_of(mine, reader):
                    plan.add(self._of_join(mine, reader))
                elif not is_alike or self._reads_right_beside(mine):
                    plan.add(self._of_readers(mine, depth))
                else:
                    plan.problems.append(f"{self.log.log[mine]} also reads another value that is wrong")
            elif self.log.log[mine].inputs[at] != reference.log[reader].inputs[position]:
                # A record that has the value read here shows this memory, so the memory itself gets the other value,
                # unless another call rightly reads what is there.
                shown = (reference.log[reader].inputs[position], self.log.log[mine].inputs[at]) in self.pairs
                shown &= not self._is_rightly_read(mine, at)
                plan.candidate.append(self._at_reader(here, there, in_place or shown))
                plan.reference += self._at_readers_there(here, there, in_place or shown)
        plan.add(self._of_records(index))
        if not plan.candidate and not plan.problems and not depth:
            plan.problems.append(f"no call of the candidate stands for one that reads what {call} gives")
        return checked(_in_order(plan))

    def _is_rightly_read(self, reader: int, position: int) -> bool:
        """Whether another call than `reader` reads the value of this input, and so does its match."""
        producer, value = self.log.input_producers(reader)[position], self.log.log[reader].inputs[position]
        for other, at in self.log.readers(producer) if producer is not None else ():
            theirs = self.log.matching_call(other)
            due = self.log.reference.log[theirs].inputs if theirs is not None else ()
            if other != reader and self.log.log[other].inputs[at] == value and due[at : at + 1] == (value,):
                return True
        return False

    def _of_records(self, index: int) -> Draft:
        """Return the exchanges for records that have the output of a missing call.

        Example: `all_reduce` is missing. In the candidate, the output of the call that computed the local gradient is
        replaced by the reduced gradient. There is no exchange if another reader needs the local gradient.
        """
        call, plan = self.log.reference.log[index], Draft()
        for wanted, held in self.pairs:
            made = self.log.producer(wanted, held) if wanted in call.outputs else None
            if made is None or held not in self.log.log[made].outputs:
                continue
            # The record's own call has a match with the wanted value: the missing call's output only equals it, as
            # zeros do.
            if (other := self.log.matching_call(made)) is not None and wanted in self.log.reference.log[other].outputs:
                continue
            readers = [(self.log.matching_call(reader), position) for reader, position in self.log.readers(made)]
            due = [self.log.reference.log[other].inputs[at : at + 1] for other, at in readers if other is not None]
            # Another reader needs the value unchanged; or it is wrong already, and an earlier call is to blame.
            if (held,) in due or held not in self.log.reference.values:
                continue
            here = ValueSite(self.rank, made, self.log.log[made].outputs.index(held))
            there = ValueSite(self.rank, index, call.outputs.index(wanted))
            plan.candidate.append(Swap(here, there, self.log.log[made].operator, held, wanted))
            plan.reference.append(Swap(there, here, call.operator, wanted, held))
        return plan

    def _of_join(self, mine: int, theirs: int) -> Draft:
        """Return exchanges of the outputs of `mine`, if it lacks an input of its match `theirs`, or reads it in another
        dtype.
        """
        call = self.log.log[mine]
        if set(call.inputs) <= self.log.reference.values:
            return of_matching(self.log, self.rank, mine, theirs)
        return Draft(problems=[f"{call} also reads another value that is wrong"])

    def of_this_repeat(self, draft: Draft) -> Draft:
        """Return `draft` with reverse exchanges for a recomputed value's readers alone.

        In the reference, one call stands for all calls that compute the value, so its own output stays right. Exchanges
        on other ranks, where a message is received, stay. Returns `draft` without recomputed values, and if a record
        shows the value, as a record has no reader.
        """
        shown = {held for _, held in self.pairs}
        own = [swap for swap in draft.candidate if swap.site.rank == self.rank]
        elsewhere = [swap for swap in draft.reference if swap.site.rank != self.rank]
        repeats = (self.log.is_repeated(swap.site.call) for swap in draft.reference if swap not in elsewhere)
        if not any(repeats) or any(swap.found in shown for swap in own):
            return draft
        found, seen, pending = list[Swap](), set[tuple[int, int]](), list[tuple[int, int]]()
        for site in (swap.site for swap in own):
            pending += [(site.call, site.position)] if site.is_input else self.log.readers(site.call)
        while pending:
            reader, position = pending.pop()
            if (reader, position) in seen:
                continue
            seen.add((reader, position))
            other = self.log.matching_call(reader)
            if other is None or self.log.is_repeated(other):
                pending += self.log.readers(reader)
                continue
            call, partner = self.log.log[reader], self.log.reference.log[other]
            if len(call.inputs) != len(partner.inputs):
                return draft
            at = _position_there(call, partner, position)
            if call.inputs[position] != partner.inputs[at]:
                pair = ValueSite(self.rank, reader, position, True), ValueSite(self.rank, other, at, True)
                found += self._at_readers_there(*pair)
        found.sort(key=lambda swap: swap.site)
        return Draft(draft.candidate, [*found, *elsewhere], draft.problems) if found else draft

    def _at_reader(self, mine: ValueSite, theirs: ValueSite, in_place: bool = False) -> Swap:
        """Return the exchange that makes the call at the site `mine` in the candidate read the reference's value at
        `theirs`.
        """
        call, partner = self.log.log[mine.call], self.log.reference.log[theirs.call]
        value = _source(self.log.reference, self.rank, theirs.call, theirs.position)
        found, wanted = call.inputs[mine.position], partner.inputs[theirs.position]
        return Swap(mine, value, call.operator, found, wanted, in_place=in_place)

    def _at_readers_there(self, mine: ValueSite, theirs: ValueSite, in_place: bool = False) -> list[Swap]:
        """Return the reverse exchanges: the call at the site `theirs` in the reference, and all other calls that the
        candidate's call at `mine` matches, read the candidate's value.
        """
        call, partner = self.log.log[mine.call], self.log.reference.log[theirs.call]
        value = _source(self.log, self.rank, mine.call, mine.position)
        found, wanted = partner.inputs[theirs.position], call.inputs[mine.position]
        again = {theirs.call, *self.log.all_matching_there(mine.call)}
        return [
            Swap(theirs._replace(call=each), value, partner.operator, found, wanted, in_place=in_place)
            for each in sorted(again)
            if self.log.reference.log[each].inputs == partner.inputs
        ]


def of_matching(log: CandidateLog, rank: int, mine: int, theirs: int) -> Draft:
    """Return exchanges for call `mine` and its match `theirs`: those of all outputs in which they differ."""
    call, partner, plan = log.log[mine], log.reference.log[theirs], Draft()
    for position, (found, wanted) in enumerate(zip(call.outputs, partner.outputs, strict=True)):
        if found != wanted:
            here, there = ValueSite(rank, mine, position), ValueSite(rank, theirs, position)
            plan.candidate.append(Swap(here, there, call.operator, found, wanted))
            plan.reference.append(Swap(there, here, partner.operator, wanted, found))
    return checked(plan)


def checked(plan: Draft) -> Draft:
    """Return `plan`, unless it exchanges a value that cannot be digested, such as a sparse tensor.

    If it does, return a draft without exchanges that has this as its problem.
    """
    has_none = [swap for swap in (*plan.candidate, *plan.reference) if OPAQUE in (swap.found, swap.wanted)]
    if has_none:
        text = f"{has_none[0].operator} gives a tensor without bytes of its own, such as a sparse one"
        return Draft(problems=[text])
    return plan


def _in_order(plan: Draft) -> Draft:
    """Return the exchanges in the order in which they are made. Only the first of each system replaces a known value.

    The others may be after it, and then have another value to replace, or share memory with it.
    """
    for swaps in (plan.candidate, plan.reference):
        swaps.sort(key=lambda swap: (swap.site.call, not swap.site.is_input, swap.site.position))
        once = {swap.site: swap for swap in swaps}.values()
        swaps[:] = [swap if number == 0 else swap._replace(found="") for number, swap in enumerate(once)]
    return plan


def _output_with(call: Call, value: str) -> int | None:
    """Return the position of the call's output whose digest is `value`.

    If an alias of an output has this digest instead, returns -1 for the call's first alias, -2 for the second, and so
    on. None if no output or alias has it, for example if several calls each wrote a part of the memory.
    """
    if value in call.outputs:
        return call.outputs.index(value)
    return -1 - call.aliases.index(value) if value in call.aliases else None


def _position_there(call: Call, partner: Call, position: int) -> int:
    """Return the position in which the matching call reads the input that `call` reads at `position`.

    It differs from `position` only for operators such as `mul`, whose two inputs may be in the other order. Both calls
    have equally many inputs.
    """
    if len(call.inputs) == 2 and name_of(call) in COMMUTATIVE:
        (mine, beside), (same, turned) = (
            (inputs[position], inputs[1 - position]) for inputs in (call.inputs, partner.inputs)
        )
        return 1 - position if mine != same and (mine == turned or beside == same) else position
    return position


def _is_left(log: CandidateLog, index: int, position: int) -> bool:
    """Whether an input, or the tensor that it is a view of, existed before the step."""
    maker = producer_of(log.log, log.input_producers, index, position)
    return maker is None or (log.log[maker].view and not log.producers(maker))


def _source(log: CandidateLog | ReferenceLog, rank: int, index: int, position: int) -> ValueSite:
    """Return the site of an input's value: the output of the call that computes it, or else this input itself."""
    call, producer = (
        log.log[index],
        log.input_producers(index)[position] if position < len(log.input_producers(index)) else None,
    )
    value = call.inputs[position]
    if producer is not None and value in log.log[producer].outputs:
        return ValueSite(rank, producer, log.log[producer].outputs.index(value))
    return ValueSite(rank, index, position, is_input=True)
