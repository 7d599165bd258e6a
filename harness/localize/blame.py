"""Which call is to blame: the first, in execution order, whose inputs agree and whose output does not.

1. A call of the candidate agrees when the reference called the same operator in the same direction and
   got the same outputs; chunk 0 may not stand for chunk 1, but what runs once may stand for either. The
   module does not count: passes write joins and sums of their own. A call of an operator that the
   reference never called agrees when the reference computed its values in some other way.
2. Start at the tensors that differ, and walk back from each call to those that computed its inputs, as
   long as some input does not agree. A call whose inputs all agree is a root. Values that differ and
   reach no result are never visited, so what a pass adds raises no suspicion by itself. Of calls that the
   reference lacks, a view is passed over in favor of the call that reads it.
3. A collective's inputs are those of all ranks that took part: a rank that received bad rows is not to
   blame, nor is the collective; the rank that sent them is.
4. Of the roots, the first in execution order is the answer, on the lowest rank; the others are listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.localize.calls import Call, Place

Site = tuple[int, int]
"""A rank, and a call's index in its log."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The call to blame. `ranks` are all on which this call's output differs.

    `reference` is the index, in the reference's log of that rank, of the call that it should equal: one
    with the same inputs if there is one (the operator computes something else), else the one in the
    same turn (it was given other, good values); None when the reference has no such call.
    """

    rank: int
    index: int
    call: Call
    ranks: tuple[int, ...]
    reference: int | None
    same_inputs: bool


def find_culprit(
    reference: Sequence[Sequence[Call]], candidate: Sequence[Sequence[Call]], differing: Mapping[int, Iterable[str]]
) -> Culprit | None:
    """Compare one step's logs, one a rank. `differing` gives, by rank, the candidate's digests of tensors that differ.

    None when no call explains them: they were changed outside of any operator.
    """
    logs = [_Log(calls, _Reference(known)) for calls, known in zip(candidate, reference, strict=True)]
    roots = _roots(logs, differing)
    if not roots:
        return None
    index, rank = min((index, rank) for rank, index in roots)
    log = logs[rank]
    partner, same_inputs = log.reference.partner(log.calls[index], log.turn(index))
    return Culprit(
        rank=rank,
        index=index,
        call=log.calls[index],
        ranks=tuple(sorted(r for r, i in roots if i == index and logs[r].has_same(i, log.calls[index]))),
        reference=partner,
        same_inputs=same_inputs,
    )


def facts_of(culprit: Culprit) -> dict[str, Any]:
    """What a report says of the call to blame, by the names of a Divergence's fields."""
    call = culprit.call
    return {
        "module": call.place.module,
        "direction": call.place.direction,
        "chunk": call.place.chunk,
        "operator": call.operator,
        "node": call.node,
        "source": call.source,
        "operator_rank": culprit.rank,
        "operator_ranks": ", ".join(map(str, culprit.ranks)),
    }


def _roots(logs: Sequence[_Log], differing: Mapping[int, Iterable[str]]) -> set[Site]:
    """Every call in the history of the differing tensors whose inputs agree and whose outputs do not."""
    starts = [(rank, log.last_producer(digest)) for rank, log in enumerate(logs) for digest in differing.get(rank, ())]
    pending: list[Site] = [(rank, index) for rank, index in starts if index is not None]
    seen, roots = set(pending), set()
    while pending:
        rank, index = pending.pop()
        peers = [rank]
        if logs[rank].calls[index].collective:
            peers = [r for r, log in enumerate(logs) if log.has_same(index, logs[rank].calls[index])]
        earlier = {(peer, producer) for peer in peers for producer in logs[peer].bad_producers(index)}
        if not earlier:
            roots.add((rank, index))
        pending += sorted(earlier - seen)
        seen |= earlier
    return roots


class _Log:
    """One rank's calls, and which of them agree with the reference's."""

    def __init__(self, calls: Sequence[Call], reference: _Reference) -> None:
        self.calls = calls
        self.reference = reference
        self._producers: list[dict[str, int]] = []
        self._agrees = [reference.knows(call) for call in calls]
        self._latest: dict[str, int] = {}
        self._bad: list[tuple[int, ...]] = []
        for index, call in enumerate(calls):
            found = [self._latest[value] for value in call.inputs if value in self._latest]
            self._bad.append(tuple(producer for producer in found if not self._agrees[producer]))
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

    def bad_producers(self, index: int) -> set[int]:
        """The calls that gave a call's inputs and do not agree."""
        found, pending = set(), list(self._bad[index])
        while pending:
            producer = pending.pop()
            if self._is_new(index) and self._is_new(producer) and self.calls[producer].view:
                pending += self._bad[producer]
            else:
                found.add(producer)
        return found

    def _is_new(self, index: int) -> bool:
        return not self.reference.calls(self.calls[index])

    def has_same(self, index: int, call: Call) -> bool:
        """Whether this rank made the same call at the same point of its log."""
        mine = self.calls[index] if index < len(self.calls) else None
        return mine is not None and (mine.place, mine.operator) == (call.place, call.operator)


class _Reference:
    """What the reference computed on one rank, by direction and operator."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._values = {value for call in calls for value in (*call.inputs, *call.outputs)}
        self._chunks: dict[tuple[str, str, tuple[str, ...]], set[int | None]] = defaultdict(set)
        self._indices: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            self._chunks[*_kind(call), call.outputs].add(call.place.chunk)
            self._indices[_kind(call)].append(index)

    def knows(self, call: Call) -> bool:
        """Whether the reference has this call's outputs where they belong."""
        if not self.calls(call):
            return all(value in self._values for value in call.outputs)
        chunks = self._chunks.get((*_kind(call), call.outputs), set())
        return bool(chunks) and (call.place.chunk is None or None in chunks or call.place.chunk in chunks)

    def calls(self, call: Call) -> bool:
        """Whether the reference calls such an operator at all."""
        return _kind(call) in self._indices

    def partner(self, call: Call, turn: int) -> tuple[int | None, bool]:
        """The call that `call`, the turn-th of its operator at its place, should equal; whether its inputs do."""
        indices = [i for i in self._indices.get(_kind(call), ()) if _fits(self._calls[i].place, call.place)]
        for index in indices:
            if self._calls[index].inputs == call.inputs:
                return index, True
        indices = [i for i in indices if self._calls[i].place.module == call.place.module]
        return (indices[turn] if turn < len(indices) else None), False


def _kind(call: Call) -> tuple[str, str]:
    return call.place.direction, call.operator


def _fits(first: Place, second: Place) -> bool:
    return None in (first.chunk, second.chunk) or first.chunk == second.chunk
