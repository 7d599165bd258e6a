"""A rank's log of the candidate, in which each call is matched with a call of the reference's log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Literal

from bitproof.harness.localize.logs.calls import READS_OUT, Call, is_abandoned, returns_only_inputs
from bitproof.harness.localize.logs.matching import Matching
from bitproof.harness.localize.logs.packing import CONSTANTS, PACKING, name_of
from bitproof.harness.localize.logs.reference_log import COMMUTATIVE, IndexedLog, ReferenceLog


class CandidateLog(IndexedLog):
    """A rank's calls in the candidate, each matched with a call of the `reference` log of the same rank."""

    def __init__(self, calls: Sequence[Call], reference: ReferenceLog) -> None:
        super().__init__(calls)
        self.reference = reference
        self.values = {value for call in calls for value in (*call.inputs, *call.outputs, *call.aliases)}
        self._matching = Matching(calls, reference.log)
        self._last: dict[str, int] = {}
        self._num_makers = Counter[str]()
        self._input_producers = list[tuple[int | None, ...]]()
        self._read_out: int | None = None
        # Call by call: `_find_producers` looks up the last call so far with an equal output, and must find no later
        # call.
        for index, call in enumerate(calls):
            self._input_producers.append(self._find_producers(index, call))
            for value in (*call.aliases, *call.outputs):
                self._last[value] = index
                self._num_makers[value] += 1

    def matching_call(self, index: int) -> int | None:
        """Return the index of the reference's call that matches the candidate's call `index`; None if no call does."""
        return self._matching.theirs[index]

    def matching_here(self, index: int) -> int | None:
        """Return the index of the candidate's call that matches the reference's call `index`; None if there is none."""
        return self._matching.mine[index]

    def all_matching_there(self, index: int) -> Sequence[int]:
        """Return the indices of all calls of the reference that the candidate's call `index` matches.

        There are several if the reference computes a value again that the candidate computes once.
        """
        return self._all_matching_there.get(index, ())

    @cached_property
    def _all_matching_there(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for theirs, mine in enumerate(self._matching.mine):
            if mine is not None:
                found[mine].append(theirs)
        return found

    def is_repeated(self, index: int) -> bool:
        """Whether several calls of the candidate match the reference's call `index`, as recomputed calls do."""
        return index in self._matching.repeated

    def differs(self, index: int) -> bool:
        """Whether a call's output is wrong: it differs from that of the reference's matching call.

        Without a match, an output is wrong if the reference has it nowhere. A collective that is never waited for is
        wrong.
        """
        # A collective without a wait comes before its outputs are compared, as it has none.
        call, other = self.log[index], self.matching_call(index)
        if is_abandoned(call):
            return True
        if other is None:
            return not self.reference.values.issuperset(call.outputs)
        due = self.reference.log[other]
        if call.view and call.operator != due.operator:
            # A `slice` that matches a `split` is a part of it.
            return not (set(call.outputs) <= set(due.outputs) or set(call.outputs) >= set(due.outputs))
        return call.outputs != due.outputs

    def is_as_matched(self, index: int, value: str) -> bool:
        """Whether a call's output `value` is the output of its matching call, at the same position if both calls have
        equally many outputs.
        """
        other, outputs = self.matching_call(index), self.log[index].outputs
        due = self.reference.log[other].outputs if other is not None else ()
        if value not in outputs or len(outputs) != len(due):
            # A `split` may match a `slice` that takes another of its parts.
            is_part = self.log[index].view and not self.differs(index)
            return value in due or value not in outputs or (is_part and value in self.reference.values)
        return due[outputs.index(value)] == value

    def _find_producers(self, index: int, call: Call) -> tuple[int | None, ...]:
        """Return the producer of each input: the call that wrote it or, for a wrong value that no call wrote there, the
        last call with an equal output. None for a value from before the step.

        If the call may use a number that an earlier call read out of a tensor, the earlier call is added at the end.
        """
        # A wrong value may come from a call that wrote it elsewhere: in a log of several steps, from an earlier step.
        right, inputs = self.reference.values, zip(call.inputs, call.producers, strict=False)
        own = (self._last.get(value) if by is None and value not in right else by for value, by in inputs)
        producers = (*own, *call.producers[len(call.inputs) :])
        if call.operator == READS_OUT and self.differs(index):
            self._read_out = index
        return (*producers, self._read_out) if self._may_have_read(index, call) else producers

    def _may_have_read(self, index: int, call: Call) -> bool:
        """Whether a call may use a wrong number that an earlier call, such as `item()`, read out of a tensor.

        Both calls must be of the optimizer's update, and this call's numbers must differ from its match's.
        """
        # The log cannot follow a number through Python, so this is a guess. It is limited to the update, because a
        # forward reads many numbers, such as counts of rows.
        other = self.matching_call(index)
        if self._read_out is None or other is None or index == self._read_out:
            return False
        directions = {self.log[self._read_out].place.direction, call.place.direction}
        return directions == {"update"} and call.scalars != self.reference.log[other].scalars

    def producer(self, wanted: str, digest: str) -> int | None:
        """Return the candidate's call that produced a record's value `digest`; None if no call did.

        `wanted` is the digest of the reference's value. If several calls produced `digest`, returns the call that
        matches the producer of `wanted`. If none matches it, returns the last of those at its place, first those of its
        operator; and else the last of all.
        """
        known = self.reference.producer(wanted)
        if known is not None and self._num_makers[digest] > 1:
            right = self.reference.log[known]
            at_place = [i for i in self.all_with(digest) if self.log[i].place == right.place]
            there = [i for i in at_place if self.log[i].operator == right.operator]
            if there:
                mine = self.matching_here(known)
                return mine if mine in there else there[-1]
            if at_place:
                return self._before_unchanged(at_place[-1], digest)
        return self._before_unchanged(self._last.get(digest), digest)

    def _before_unchanged(self, index: int | None, value: str) -> int | None:
        """Follow a value back from call `index` through calls that leave it unchanged; return its producer.

        For example, `_fused_adamw_` counts its gradients as written, but does not change them.
        """
        while index is not None and name_of(call := self.log[index]).endswith("_") and value in call.inputs:
            producer = self._input_producers[index][call.inputs.index(value)]
            if producer is None:
                break
            index = producer
        return index

    def input_producers(self, index: int) -> Sequence[int | None]:
        """Return, for each input of a call, the index of the call that produced it.

        None for a value from before the step.
        """
        return self._input_producers[index]

    def producer_of_input(self, index: int, position: int) -> int | None:
        """Return the index of the call that produced an input; None for a value from before the step.

        For a view of such a value, return the view's call, as `input_producers` does; but None if the reference lacks
        the value.
        """
        producer = self._input_producers[index][position] if position < len(self._input_producers[index]) else None
        view = producer
        while view is not None and self.log[view].view and self.log[view].operator != "view.dtype":
            # A view of a value from before the step that the reference lacks: nothing in this step made that value.
            made_by = self._input_producers[view][0] if self._input_producers[view] else None
            if made_by is None and not self.reference.values.issuperset(self.log[view].inputs):
                return None
            view = made_by
        return producer

    def untracked_read(self, index: int, known: Sequence[str] = ()) -> Literal["unwritten", "outside"] | None:
        """Return "unwritten" if a call reads uninitialized memory, "outside" if it reads memory that no operator wrote.

        NumPy, for example, writes outside torch's operators. Returns None for all other calls. Reads through views
        count. Inputs with digests in `known` do not count.
        """
        for position, (value, producer) in enumerate(
            zip(self.log[index].inputs, self._input_producers[index], strict=False)
        ):
            if value in known:
                continue
            # Through views to the call that reads the memory itself: only its entry has the positions.
            call, at = self.log[index], position
            while producer is not None and self.log[producer].view and self.log[producer].inputs:
                call, at, producer = self.log[producer], 0, self._input_producers[producer][0]
            if at in call.unwritten:
                return "unwritten"
            if at in call.outside:
                return "outside"
        return None

    def reads_unwritten(self, index: int) -> bool:
        """Whether a call reads uninitialized memory."""
        return self.untracked_read(index) == "unwritten"

    def differing_inputs(self, mine: int, due: int) -> Iterator[tuple[int | None, int | None]]:
        """Yield a pair of positions for each input in which a call and the reference's call `due` differ.

        Usually the two are equal. The order of a sum's inputs has no meaning, and of two calls with unequally many
        inputs, those with equal values correspond. None for an input that the other call lacks.
        """
        call, partner = self.log[mine], self.reference.log[due]
        values, wanted = call.inputs, partner.inputs
        # The positions that remain to be compared.
        own, known = [*range(len(values))], [*range(len(wanted))]
        if name_of(call) in COMMUTATIVE or len(own) != len(known):
            for position in [*own]:
                if (same := next((i for i in known if wanted[i] == values[position]), None)) is not None:
                    own.remove(position)
                    known.remove(same)
        # Both inputs of a sum differ: compare each with the input whose producer matches its own.
        if len(own) == len(known) == 2 and name_of(call) in COMMUTATIVE:
            given = self.reference.input_producers(due)
            matches = [(self._input_producers[mine][i], given[j]) for i, j in zip(own, known[::-1], strict=True)]
            if any(a is not None and self.matching_call(a) == b for a, b in matches):
                known = known[::-1]
        for at, there in zip_longest(own, known):
            if at is None or there is None or values[at] != wanted[there]:
                yield at, there

    @cached_property
    def read_by_python(self) -> list[int]:
        """Return the draws that Python may have read: no call reads the draw or a view of it, or only `item()` does."""
        ends = (self._behind_reads(index) for index in range(len(self.log)) if not self.readers(index))
        return sorted({index for index in ends if self.log[index].draws})

    def _behind_reads(self, index: int) -> int:
        while self.log[index].view or self.log[index].operator == READS_OUT:
            if not self._input_producers[index] or (producer := self._input_producers[index][0]) is None:
                break
            index = producer
        return index

    def lacks(self, index: int) -> bool:
        """Whether no output of the reference's call `index` is a value of any of the candidate's calls."""
        return self.values.isdisjoint(self.reference.log[index].outputs)

    def reads_right_values(self, index: int) -> bool:
        """Whether every input of a call is a value of the reference, at any of the reference's calls."""
        return self.reference.values.issuperset(self.log[index].inputs)

    def has(self, values: Iterable[str]) -> bool:
        """Whether all of these values are inputs or outputs of the candidate's calls."""
        return self.values.issuperset(values)

    def read_behind(self, index: int) -> set[str]:
        """Return what a call that only the candidate makes, and the calls before it that only the candidate makes, read
        of other calls. Empty if both systems make the call.
        """
        return _read_behind(index, self, self.matching_call)

    def read_behind_there(self, index: int) -> set[str]:
        """Return the same for a call of the reference."""
        return _read_behind(index, self.reference, self.matching_here)

    def makes_right_values(self, index: int) -> bool:
        """Whether a call's outputs are right: each is a value of the reference, or contains such values for other
        calls.

        For example, an extra `all_reduce` sums a bucket, and right gradients are taken out of the sum. False for
        constants, whichever call computes them, and in-place calls.
        """
        # Constants are no evidence, since zeros are everywhere; and an in-place call also overwrites a value.
        call, name = self.log[index], name_of(self.log[index])
        constants = {x for other in (call, *self.reference.log) if name_of(other) in CONSTANTS for x in other.outputs}
        if constants.issuperset(call.outputs) or name.endswith("_"):
            return False
        missing = set(call.outputs) - self.reference.values
        readers = [i for i, position in self.readers(index) if self.log[i].inputs[position] in missing]
        takers = [i for i in readers if self.packs(i)]
        return not missing or (bool(takers) and all(map(self.makes_right_values, takers)))

    def packs(self, index: int) -> bool:
        """Whether a call computes nothing: it joins values, takes them apart, or returns an input unchanged."""
        call = self.log[index]
        if returns_only_inputs(call):
            return not call.collective
        # A clone that changes its value is wrong, and packs nothing.
        return call.view or (name_of(call) in PACKING and name_of(call) != "clone")


def _read_behind(index: int, log: IndexedLog, match: Callable[[int], int | None]) -> set[str]:
    pending, seen, found = [index], set[int](), set[str]()
    while pending:
        if (current := pending.pop()) in seen or match(current) is not None:
            continue
        seen.add(current)
        for value, producer in zip(log.log[current].inputs, log.input_producers(current), strict=False):
            if producer is None or match(producer) is not None:
                found.add(value)
            else:
                pending.append(producer)
    return found
