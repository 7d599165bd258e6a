"""Where two sides of an output part, in the words of the step: module, direction, chunk, operator, source line.

A call has a partner where the other graph computes its term, whatever calls it is made of there. The first calls
without a partner, those that read nothing but what has one, are where the sides part. Where both sides have as many
additions without partners, additions were moved: before a reduction on one side, after it on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitproof.harness.certificate.data import Call, Tensor
from bitproof.harness.operators import names
from bitproof.harness.prove import known_operators
from bitproof.harness.prove.canonical import Canonicalizer
from bitproof.harness.prove.graphs.export import CallOrigin
from bitproof.harness.prove.layouts import shows
from bitproof.harness.prove.terms import Table

_MOST = 3
_ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Shown:
    """One call, for a reader."""

    operator: str
    node: str
    module: str | None
    direction: str | None
    chunk: int | None
    source: str | None
    shape: tuple[str, ...]

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f", chunk {self.chunk}"
        source = "" if self.source is None else f", {self.source}"
        where = f"{self.module or 'no module'} ({self.direction}{chunk}{source})"
        return f"{self.operator} `{self.node}` [{', '.join(self.shape)}] in {where}"


@dataclass(frozen=True)
class FirstDifferences:
    """For each side, reference first, the first calls without a partner, and the additions that were moved."""

    first: tuple[tuple[Shown, ...], tuple[Shown, ...]]
    moved: tuple[tuple[Shown, ...], tuple[Shown, ...]]

    def lines(self) -> list[str]:
        """The finding for a reader, a call a line."""
        lines = []
        for side, first, moved in zip(("reference", "candidate"), self.first, self.moved, strict=True):
            shown: dict[Shown, str] = dict.fromkeys(first, "only the {} computes")
            shown |= dict.fromkeys(moved, "the {} adds here:")
            lines += [f"{words.format(side)} {call}" for call, words in shown.items()]
        return lines


def explain(reference: Canonicalizer, candidate: Canonicalizer, wanted: int, other: int) -> FirstDifferences:
    """Where two sides of an output part, which the calls `wanted` and `other` give."""
    sides = reference, candidate
    known = [side.computed for side in sides]
    alone = [
        [i for i in _behind(side, root) if not _has_partner(side.table, side.values[i], known[1 - place])]
        for place, (side, root) in enumerate(zip(sides, (wanted, other), strict=True))
    ]
    added = [[i for i in calls if side.graph.calls[i].op == _ADD] for side, calls in zip(sides, alone, strict=True)]
    was_moved = len(added[0]) == len(added[1]) <= _MOST
    first: list[tuple[Shown, ...]] = []
    moved: list[tuple[Shown, ...]] = [(), ()]
    for side, known_there, calls in zip(sides, known[::-1], alone, strict=True):
        starts = _starts(side, calls, known_there)
        first.append(tuple(_shown(side.graph.calls[i]) for i in starts[:_MOST]))
    if was_moved:
        moved = [tuple(_shown(side.graph.calls[i]) for i in calls) for side, calls in zip(sides, added, strict=True)]
    return FirstDifferences((first[0], first[1]), (moved[0], moved[1]))


def _starts(side: Canonicalizer, alone: list[int], known: set[int]) -> list[int]:
    """The calls without a partner that read none, and the first calls behind them to move elements otherwise.

    A concatenation in another order is no call without a partner, since its parts have theirs; what first reads it by
    an opaque operator, casts and sums later, is one. So from there it is looked for through all that the other side
    does not compute as it stands. What a write in place leaves is the value of all that it wrote, the input itself
    included; so it counts for none.
    """
    calls = side.graph.calls
    lonely = {i for i in alone if calls[i].op != "input" and not calls[i].writes}
    starts = [i for i in alone if calls[i].op != "input" and not lonely.intersection(side.reads[i])]
    moves: set[int] = set()
    stack, seen = list(starts), set(starts)
    while stack:
        index = stack.pop()
        others = [read for read in calls[index].reads if calls[read].op != "input" and _is_moved(side, read, known)]
        if not others and index not in lonely:
            moves.add(index)
        stack += [read for read in others if read not in seen]
        seen.update(others)
    return sorted({*starts, *moves})


def _is_moved(side: Canonicalizer, index: int, known: set[int]) -> bool:
    """Whether the other side has no such value as it stands."""
    value = side.values[index]
    return isinstance(value, int) and value not in known


def row_splits(reference: Canonicalizer, candidate: Canonicalizer) -> tuple[str, ...]:
    """Opaque operators that one side runs on a whole and the other on its two halves, by their first calls.

    No rule says that a kernel gives a row the same bits whatever rows stand around it, so a step that runs in chunks
    is never proved equal to one that does not.
    """
    found: dict[str, None] = {}
    groups: list[dict[Any, list[tuple[Any, ...]]]] = [{}, {}]
    for calls, side, other in ((groups[0], reference, candidate), (groups[1], candidate, reference)):
        known = other.computed
        for index, call in enumerate(side.graph.calls):
            if not (isinstance(call.value, Tensor) and _is_opaque(call, side.graph.calls)):
                continue
            if not _has_partner(side.table, side.values[index], known):
                place = CallOrigin(*call.place)
                key = call.op, place.module, place.direction
                calls.setdefault(key, []).append(call.value.shape)
    for key in groups[0].keys() & groups[1].keys():
        for one, two in ((groups[0], groups[1]), (groups[1], groups[0])):
            shapes = set(two[key])
            if len(two[key]) == 2 * len(one[key]) and any(_is_half(h, w) for w in one[key] for h in shapes):
                found[key[0].removeprefix("aten.").removesuffix(".default")] = None
    return tuple(sorted(found))


_MOVES = names(lambda row: row.moves or row.is_constant)
"""Names, without overload, of operators that make or move elements: split, they show a split, and cause nothing."""


def _is_half(half: tuple[Any, ...], whole: tuple[Any, ...]) -> bool:
    if len(half) != len(whole) or not all(isinstance(n, int) for n in (*half, *whole)):
        return False
    other = [(h, w) for h, w in zip(half, whole, strict=True) if h != w]
    return len(other) == 1 and other[0][0] * 2 == other[0][1]


def _is_opaque(call: Call, calls: Sequence[Call]) -> bool:
    known = known_operators.COPIES.keys() | known_operators.EXACT.keys() | {"input", "constant", "getitem"}
    if call.op in known or shows(call, calls):
        return False
    return call.op.split(".")[1] not in _MOVES


def _has_partner(table: Table, value: Any, known: set[int]) -> bool:
    places = [place for place in (value if isinstance(value, list) else [value]) if place is not None]
    return bool(places) and all(_is_known(table, place, known) for place in places)


def _is_known(table: Table, place: int, known: set[int]) -> bool:
    """Whether the other side has a term, or all that it only joins or shows."""
    match table[place]:
        case _ if place in known:
            return True
        case ("cat", places, _):
            return all(_is_known(table, part, known) for part in places)
        case ("view", base, *_):
            return _is_known(table, base, known)
    return False


def _behind(side: Canonicalizer, root: int) -> list[int]:
    """The calls that an output is made of, in the graph's order, those that wrote its memory among them."""
    seen, stack = set(), [root]
    while stack:
        index = stack.pop()
        if index not in seen:
            seen.add(index)
            stack.extend(side.reads[index])
            stack.extend(writer for writer in side.memory.writers(index) if writer <= root or index == root)
    return sorted(seen)


def _shown(call: Call) -> Shown:
    shape = tuple(map(str, call.value.shape)) if isinstance(call.value, Tensor) else ()
    operator = call.op.removesuffix(".default")
    return Shown(operator, call.name, *CallOrigin(*call.place), shape)
