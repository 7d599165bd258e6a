"""A rank's log of a step, indexed by operator and place; the reference's log also by value."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from bitproof.harness.localize.logs.calls import READS_OUT, Call, CallSite
from bitproof.harness.operators import names

COMMUTATIVE = names(lambda row: row.commutes)
"""Operators whose result does not depend on the order of their two tensors, such as `add`."""


class IndexedLog:
    """A rank's calls in a step, indexed by operator and place."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.log = calls
        self._there: dict[tuple[str, CallSite], list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            self._there[call.operator, call.place].append(index)

    def there(self, call: Call) -> Sequence[int]:
        """Return the indices of all calls in this log that have the operator and place of `call`."""
        return self._there.get((call.operator, call.place), ())

    def occurrence(self, index: int) -> int:
        """Return the number of earlier calls that have the operator and place of call `index`."""
        return bisect_left(self.there(self.log[index]), index)

    def of_occurrence(self, call: Call, occurrence: int) -> int | None:
        """Return the index of the call with this operator and place before which `occurrence` such calls come; else
        None.
        """
        there = self.there(call)
        return there[occurrence] if occurrence < len(there) else None

    def input_producers(self, index: int) -> Sequence[int | None]:
        """Return, for each input of a call, the index of the call that produced it.

        None for a value from before the step.
        """
        return self.log[index].producers

    def producers(self, index: int) -> list[int]:
        """Return the indices of the calls that produced inputs of call `index`."""
        return [producer for producer in self.input_producers(index) if producer is not None]

    @cached_property
    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for reader, call in enumerate(self.log):
            for position, producer in enumerate(self.input_producers(reader)[: len(call.inputs)]):
                if producer is not None:
                    found[producer].append((reader, position))
        return found

    def readers(self, index: int) -> Sequence[tuple[int, int]]:
        """Return a pair for each input that is an output of call `index`: the index of the reading call, and the
        position of the input.
        """
        return self._readers.get(index, ())

    def readers_of_parts(self, index: int) -> Sequence[int]:
        """Return the indices of the calls that read memory which call `index` wrote in part.

        For example, a collective reads a bucket whose parts were copied into it one by one.
        """
        return self._readers_of_parts.get(index, ())

    @cached_property
    def _readers_of_parts(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for reader, call in enumerate(self.log):
            for writer in dict.fromkeys(self.input_producers(reader)[len(call.inputs) :]):
                # A call that read a number out of a tensor follows the inputs, too.
                if writer is not None and self.log[writer].operator != READS_OUT:
                    found[writer].append(reader)
        return found

    @cached_property
    def _with(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for index, call in enumerate(self.log):
            for value in dict.fromkeys(call.outputs):
                found[value].append(index)
        return found

    def all_with(self, value: str) -> Sequence[int]:
        """Return the indices of the calls with this value among their outputs, in order. Aliases do not count."""
        # A call over lists is logged entry by entry after it has run as a whole, so aliases of its first entry may have
        # values that a later entry computes.
        return self._with.get(value, ())


class ReferenceLog(IndexedLog):
    """A rank's log of the reference, also indexed by value."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls)
        self.values = {value for call in calls for value in (*call.inputs, *call.outputs)}
        self._producers: dict[str, int] = {}
        # The first call with a value counts as its producer: later ones may only repeat it.
        for index, call in enumerate(calls):
            for value in (*call.aliases, *call.outputs):
                self._producers.setdefault(value, index)

    def producer(self, value: str) -> int | None:
        """Return the index of the first call that produced a value; None if no call did."""
        return self._producers.get(value)


def in_any_order(call: Call) -> tuple[str, ...]:
    """Return a call's inputs, sorted: equal for calls that have the same inputs in different orders."""
    return call.inputs if len(call.inputs) < 2 else tuple(sorted(call.inputs))


def values_of(call: Call) -> tuple[str, ...]:
    """Return a call's outputs, each once: a tensor may be both written in place and returned."""
    return call.outputs if len(call.outputs) < 2 else tuple(dict.fromkeys(call.outputs))


def fits(first: CallSite, second: CallSite) -> bool:
    """Whether two places agree in direction and chunk, whatever their modules. None agrees with any."""
    _, direction, chunk = first
    _, other_direction, other_chunk = second
    if direction is not None and other_direction is not None and direction != other_direction:
        return False
    return chunk is None or other_chunk is None or chunk == other_chunk
