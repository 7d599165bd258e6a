"""One rank's calls in a step by operator and place, and what the reference computed, by value too."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from bitproof.harness.localize.logs.calls import Call, Place, gives_what_it_reads
from bitproof.harness.operators import names

COMMUTATIVE = names(lambda row: row.commutes)
"""Operators whose result does not depend on which of two tensors comes first."""


class IndexedLog:
    """One rank's calls, and which of them are of one operator at one place."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.log = calls
        self._there: dict[tuple[str, Place], list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            self._there[call.operator, call.place].append(index)

    def there(self, call: Call) -> Sequence[int]:
        """The calls of the same operator at the same place, by index."""
        return self._there.get((call.operator, call.place), ())

    def turn(self, index: int) -> int:
        """How many calls of the same operator at the same place came before."""
        return bisect_left(self.there(self.log[index]), index)

    def of_turn(self, call: Call, turn: int) -> int | None:
        """The call of the same operator at the same place that has a turn; None where there are fewer."""
        there = self.there(call)
        return there[turn] if turn < len(there) else None

    def given(self, index: int) -> Sequence[int | None]:
        """The call that gave each of a call's inputs; None for what was there before the step."""
        raise NotImplementedError

    @cached_property
    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for reader, call in enumerate(self.log):
            for position, giver in enumerate(self.given(reader)[: len(call.inputs)]):
                if giver is not None:
                    found[giver].append((reader, position))
        return found

    def readers(self, index: int) -> Sequence[tuple[int, int]]:
        """The calls that read an output of a call, and the positions of these inputs, in order."""
        return self._readers.get(index, ())

    def counterpart(self, index: int, other: IndexedLog) -> int | None:
        """Another log's call of the same turn; None where that makes more or fewer of its operator at its place."""
        call = self.log[index]
        return other.of_turn(call, self.turn(index)) if len(self.there(call)) == len(other.there(call)) else None


class ReferenceLog(IndexedLog):
    """What the reference computed on one rank, by direction and operator."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls)
        self.values = {value for call in calls for value in (*call.inputs, *call.outputs)}
        self._places: dict[tuple[str, tuple[str, ...]], set[Place]] = defaultdict(set)
        self._drawn: dict[tuple[str, tuple[str, ...]], list[Call]] = defaultdict(list)
        self._views: dict[tuple[str, ...], set[Place]] = defaultdict(set)
        self._indices: dict[str, list[int]] = defaultdict(list)
        self._reading: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        self._directions: dict[str, set[str | None]] = defaultdict(set)
        self._producers: dict[str, int] = {}
        self._giving: dict[tuple[str, ...], dict[str, tuple[set[Place], int]]] = defaultdict(dict)
        for index, call in enumerate(calls):
            for value in (*call.aliases, *call.outputs):
                self._producers.setdefault(value, index)
            self._places[call.operator, call.outputs].add(call.place)
            if call.draws:
                self._drawn[call.operator, call.outputs].append(call)
            if not call.collective and not call.view and not gives_what_it_reads(call):
                places, num = self._giving[values_of(call)].get(call.operator, (set[Place](), 0))
                self._giving[values_of(call)][call.operator] = places | {call.place}, num + 1
            self._indices[call.operator].append(index)
            self._reading[call.operator, in_any_order(call)].append(index)
            self._directions[call.operator].add(call.place.direction)
            if call.view:
                self._views[call.outputs].add(call.place)
                for value in call.outputs:  # one of several: the half that a split gives, another view may take
                    self._views[value,].add(call.place)

    def knows(self, call: Call) -> bool:
        """Whether the reference has this call's outputs where they belong."""
        if not self.calls(call):
            return all(value in self.values for value in call.outputs)
        places = set(self._places.get((call.operator, call.outputs), ()))
        if call.view and self.values.issuperset(call.inputs):
            places |= self._views.get(call.outputs, set())
        if call.draws:  # several draws may read one state: their order decides their values
            drawn = self._drawn.get((call.operator, call.outputs), ())
            places = {known.place for known in drawn if _may_be_one(known, call)}
        return any(fits(place, call.place) for place in places)

    def calls(self, call: Call) -> bool:
        """Whether the reference calls such an operator at all."""
        directions = self._directions.get(call.operator, set())
        return bool(directions) and (call.place.direction is None or not directions.isdisjoint(_told(call)))

    def gives(self, call: Call) -> bool:
        """Whether the operator gives these outputs anywhere."""
        return (call.operator, call.outputs) in self._places

    def giving(self, call: Call) -> list[tuple[str, set[Place], int]]:
        """The operators whose calls give just what this one does, where, and how often.

        No views, no collectives, and none that gives what it reads.
        """
        values = values_of(call)
        return [(operator, *told) for operator, told in self._giving.get(values, {}).items()] if values else []

    def alike(self, call: Call) -> list[int]:
        """The calls of the same operator with the same inputs, by index, in the same direction and chunk."""
        return [i for i in self._reads_the_same(call) if self.log[i].inputs == call.inputs]

    def could_be(self, call: Call) -> Sequence[int]:
        """The calls of the same operator at the same place, by index; anywhere, if the place is unknown."""
        return self._indices.get(call.operator, ()) if call.place == Place(None, None) else self.there(call)

    def makes(self, call: Call) -> bool:
        """Whether the reference makes this very call there, of the same inputs and numbers."""
        return any(self.log[i].scalars == call.scalars for i in self.alike(call))

    def _reads_the_same(self, call: Call) -> list[int]:
        """The calls of the same operator with the same inputs in some order, in the same direction and chunk."""
        known = self._reading.get((call.operator, in_any_order(call)), ())
        return [i for i in known if fits(self.log[i].place, call.place)]

    def producer(self, value: str) -> int | None:
        """The first call that gave a value."""
        return self._producers.get(value)

    def given(self, index: int) -> list[int | None]:
        """The call that gave each of a call's inputs; None for what was there before the step."""
        call = self.log[index]
        producers = call.producers or [self._producers.get(value) for value in call.inputs]
        return [giver if giver is not None and giver < index else None for giver in producers]

    def givers(self, index: int) -> list[int]:
        """The calls that gave a call's inputs."""
        return [giver for giver in self.given(index) if giver is not None]

    def partner(self, call: Call, turn: int) -> tuple[int | None, Literal["computes", "exchanges"] | None]:
        """The call that `call`, the turn-th of its operator at its place, should equal.

        And what is wrong with `call` where it has the same inputs: its output, or their order.
        """
        if same := self.alike(call):
            return same[0], "computes"
        if exchanged := self._reads_the_same(call):
            return exchanged[0], "computes" if call.operator.partition(".")[0] in COMMUTATIVE else "exchanges"
        indices = [i for i in self._indices.get(call.operator, ()) if fits(self.log[i].place, call.place)]
        if any(self.log[i].place.direction is None for i in indices) or call.place.direction is None:
            return self._nearest(indices, call), None
        indices = [i for i in indices if self.log[i].place.module == call.place.module]
        by_turn = indices[turn] if turn < len(indices) else None
        return (None if by_turn is None else self._nearest(indices, call, by_turn)), None

    def _nearest(self, indices: Sequence[int], call: Call, otherwise: int | None = None) -> int | None:
        """Of the calls at these indices the first that shares most inputs with `call`, where any does.

        Of those that share as many, and where none shares any, it is the call `otherwise`.
        """
        shared = {index: len(set(self.log[index].inputs) & set(call.inputs)) for index in indices}
        best = max(shared, key=lambda index: (shared[index], index == otherwise, -index), default=None)
        return best if best is not None and shared[best] else otherwise


def _may_be_one(first: Call, second: Call) -> bool:
    """Whether two calls are of one module and one micro-batch, as far as both are known."""
    pairs = (first.place.module, second.place.module), (first.micro_batch, second.micro_batch)
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def in_any_order(call: Call) -> tuple[str, ...]:
    """What a call reads, in an order that is the same for every order of these."""
    return call.inputs if len(call.inputs) < 2 else tuple(sorted(call.inputs))


def values_of(call: Call) -> tuple[str, ...]:
    """What a call gives, each value once: what is written in place is an output twice."""
    return call.outputs if len(call.outputs) < 2 else tuple(dict.fromkeys(call.outputs))


def _told(call: Call) -> tuple[str | None, None]:
    """The directions in which a call's partner may be."""
    return call.place.direction, None


def fits(first: Place, second: Place) -> bool:
    """Whether two calls may be the same: of one direction and one chunk, as far as both are known."""
    _, direction, chunk = first
    _, other_direction, other_chunk = second
    if direction is not None and other_direction is not None and direction != other_direction:
        return False
    return chunk is None or other_chunk is None or chunk == other_chunk
