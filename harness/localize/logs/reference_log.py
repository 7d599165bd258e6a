"""A rank's calls in a step, indexed by operator and place; the reference's also by value."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from bitproof.harness.localize.logs.calls import Call, Place, gives_what_it_reads
from bitproof.harness.operators import names

COMMUTATIVE = names(lambda row: row.commutes)
"""Operators whose result does not depend on the order of their two tensors, such as `add`."""


class IndexedLog:
    """A rank's calls, indexed by operator and place."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.log = calls
        self._there: dict[tuple[str, Place], list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            self._there[call.operator, call.place].append(index)

    def there(self, call: Call) -> Sequence[int]:
        """The calls of the same operator at the same place, by index."""
        return self._there.get((call.operator, call.place), ())

    def turn(self, index: int) -> int:
        """The call's occurrence: the number of earlier calls of the same operator at the same place."""
        return bisect_left(self.there(self.log[index]), index)

    def of_turn(self, call: Call, turn: int) -> int | None:
        """The call of this occurrence of the same operator at the same place; None if there are fewer."""
        there = self.there(call)
        return there[turn] if turn < len(there) else None

    def given(self, index: int) -> Sequence[int | None]:
        """The producer of each input of a call; None for a value from before the step."""
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

    @cached_property
    def _first(self) -> dict[str, int]:
        return {value: index for index, call in reversed([*enumerate(self.log)]) for value in call.outputs}

    def first_with(self, value: str) -> int | None:
        """The first call with this value among its outputs; None if there is none.

        Aliases do not count: a call over lists has run whole when its first entry is logged, so aliases of this entry
        may have values that a later entry computes.
        """
        return self._first.get(value)

    def counterpart(self, index: int, other: IndexedLog) -> int | None:
        """The other log's call of the same operator, place and occurrence; None if the logs have different numbers of
        such calls, since occurrences then do not correspond.
        """
        call = self.log[index]
        return other.of_turn(call, self.turn(index)) if len(self.there(call)) == len(other.there(call)) else None


class ReferenceLog(IndexedLog):
    """A rank's calls of the reference, indexed by operator, inputs and outputs."""

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
            # The first call with a value counts as its producer: later ones may only repeat it.
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
                # The candidate may take one of several outputs by another view: a `slice` for half of a `split`.
                for value in call.outputs:
                    self._views[value,].add(call.place)

    def knows(self, call: Call) -> bool:
        """Whether the reference has this call's outputs at a fitting place.

        The outputs may be anywhere for an operator that the reference does not use in this direction.
        """
        if not self.calls(call):
            return all(value in self.values for value in call.outputs)
        places = set(self._places.get((call.operator, call.outputs), ()))
        # Another view of a right tensor may show the same elements: a `slice` for a `select` and an `unsqueeze`.
        if call.view and self.values.issuperset(call.inputs):
            places |= self._views.get(call.outputs, set())
        # Draws of several calls may begin from one state, so equal outputs only count in the same module.
        if call.draws:
            drawn = self._drawn.get((call.operator, call.outputs), ())
            places = {known.place for known in drawn if _may_be_one(known, call)}
        return any(fits(place, call.place) for place in places)

    def calls(self, call: Call) -> bool:
        """Whether the reference uses the call's operator in its direction; in any, if the direction is unknown."""
        directions = self._directions.get(call.operator, set())
        return bool(directions) and (call.place.direction is None or not directions.isdisjoint(_told(call)))

    def gives(self, call: Call) -> bool:
        """Whether a call of the same operator has these outputs anywhere."""
        return (call.operator, call.outputs) in self._places

    def giving(self, call: Call) -> list[tuple[str, set[Place], int]]:
        """The operators whose calls have the same outputs as this call, with their places and number.

        Left out are views, collectives, and calls that only return their inputs.
        """
        values = values_of(call)
        return [(operator, *told) for operator, told in self._giving.get(values, {}).items()] if values else []

    def alike(self, call: Call) -> list[int]:
        """Indices of the calls of the same operator, inputs, direction and chunk."""
        return [i for i in self._reads_the_same(call) if self.log[i].inputs == call.inputs]

    def could_be(self, call: Call) -> Sequence[int]:
        """Indices of the calls of the same operator at the same place; at any place, if it is unknown."""
        return self._indices.get(call.operator, ()) if call.place == Place(None, None) else self.there(call)

    def makes(self, call: Call) -> bool:
        """Whether the reference makes the same call, with the same inputs and numbers."""
        return any(self.log[i].scalars == call.scalars for i in self.alike(call))

    def _reads_the_same(self, call: Call) -> list[int]:
        """Indices of the calls of the same operator, direction and chunk with the same inputs in any order."""
        known = self._reading.get((call.operator, in_any_order(call)), ())
        return [i for i in known if fits(self.log[i].place, call.place)]

    def producer(self, value: str) -> int | None:
        """The index of the first call that produced a value; None if no call did."""
        return self._producers.get(value)

    def given(self, index: int) -> list[int | None]:
        """The producer of each input of a call; None for values from before the step."""
        call = self.log[index]
        producers = call.producers or [self._producers.get(value) for value in call.inputs]
        return [giver if giver is not None and giver < index else None for giver in producers]

    def givers(self, index: int) -> list[int]:
        """The producers of a call's inputs."""
        return [giver for giver in self.given(index) if giver is not None]

    def partner(self, call: Call, turn: int) -> tuple[int | None, Literal["computes", "exchanges"] | None]:
        """The call that the candidate's `call` should equal, and its defect: "computes", "exchanges", or None.

        1. With the same inputs: its output is wrong ("computes").
        2. With the same inputs in another order: their order is wrong ("exchanges").
        3. With other inputs (None): the call in its module that shares the most inputs, in case of a tie the occurrence
           `turn`. If a direction is unknown, only shared inputs count.
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
        """The call of `indices` that shares the most inputs with `call`; `otherwise` if none shares an input.

        In case of a tie, it is `otherwise` if that is among the nearest, or else the first.
        """
        shared = {index: len(set(self.log[index].inputs) & set(call.inputs)) for index in indices}
        best = max(shared, key=lambda index: (shared[index], index == otherwise, -index), default=None)
        return best if best is not None and shared[best] else otherwise


def _may_be_one(first: Call, second: Call) -> bool:
    """Whether two calls can be of the same module and micro-batch; None matches any."""
    pairs = (first.place.module, second.place.module), (first.micro_batch, second.micro_batch)
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def in_any_order(call: Call) -> tuple[str, ...]:
    """A call's inputs, sorted: the same for every order of them."""
    return call.inputs if len(call.inputs) < 2 else tuple(sorted(call.inputs))


def values_of(call: Call) -> tuple[str, ...]:
    """A call's outputs without repetitions: a tensor that is written in place and returned is an output twice."""
    return call.outputs if len(call.outputs) < 2 else tuple(dict.fromkeys(call.outputs))


def _told(call: Call) -> tuple[str | None, None]:
    """The directions that a call's partner may have."""
    return call.place.direction, None


def fits(first: Place, second: Place) -> bool:
    """Whether two places agree in direction and chunk; None matches any. Modules may differ."""
    _, direction, chunk = first
    _, other_direction, other_chunk = second
    if direction is not None and other_direction is not None and direction != other_direction:
        return False
    return chunk is None or other_chunk is None or chunk == other_chunk
