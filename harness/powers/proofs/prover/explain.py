"""Finds the calls at which two graphs begin to compute different values for an output.

A call has a partner if the other graph computes the same term, even by another operator. The graphs first differ at
calls that have no partner, but whose inputs all have partners.

If both graphs have equally many additions without a partner, these additions were probably moved: before a reduction in
one graph, after it in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitproof.harness.operators import names
from bitproof.harness.powers.proofs.prover import known_operators
from bitproof.harness.powers.proofs.prover.canonical import Canonicalizer
from bitproof.harness.powers.proofs.prover.graphs.export import CallOrigin
from bitproof.harness.powers.proofs.prover.layouts import shows
from bitproof.harness.powers.proofs.prover.proof_data import Call, Tensor
from bitproof.harness.powers.proofs.prover.terms import Table

_MOST = 3
_ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Shown:
    """A call as a report shows it.

    - `changed`: the arguments that differ from those of the other graph's call, as text.
    - `beside`: the neighbours of the call, as text. Used for a call without a module and a source line, such as a call
      that a pass inserted.
    """

    operator: str
    node: str
    module: str | None
    direction: str | None
    chunk: int | None
    source: str | None
    shape: tuple[str, ...]
    beside: str | None = None
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f", chunk {self.chunk}"
        source = "" if self.source is None else f", {self.source}"
        where = f"in {self.module or 'no module'} ({self.direction}{chunk}{source})"
        if self.beside is not None:
            where = self.beside
        changed = f" with {', '.join(self.changed)}" if self.changed else ""
        return f"{self.operator} `{self.node}` [{', '.join(self.shape)}]{changed} {where}"


@dataclass(frozen=True)
class FirstDifferences:
    """The calls at which two graphs first differ in an output.

    Each field is a pair: the calls of the reference, and the calls of the candidate.

    - `first`: the first calls whose value the other graph does not compute.
    - `moved`: additions that one graph seems to do before a reduction, and the other graph after it.
    - `reshaped`: two calls of the same operator on different shapes, such as all rows and half of the rows. A kernel's
      rounding may depend on the shape. None if there are no such calls.
    """

    first: tuple[tuple[Shown, ...], tuple[Shown, ...]]
    moved: tuple[tuple[Shown, ...], tuple[Shown, ...]]
    reshaped: tuple[Shown, Shown] | None = None

    def lines(self) -> list[str]:
        lines = []
        for side, first, moved in zip(("reference", "candidate"), self.first, self.moved, strict=True):
            shown: dict[Shown, str] = dict.fromkeys(first, "only the {} computes")
            shown |= dict.fromkeys(moved, "the {} adds here:")
            lines += [f"{words.format(side)} {call}" for call, words in shown.items()]
        if self.reshaped:
            one, other = self.reshaped
            shapes = f"[{', '.join(one.shape)}] in the reference and [{', '.join(other.shape)}] in the candidate"
            lines.append(f"{one.operator} returns {shapes}: its kernel may round otherwise for another shape")
        return [*dict.fromkeys(lines)]


def explain(reference: Canonicalizer, candidate: Canonicalizer, wanted: int, other: int) -> FirstDifferences:
    """Return the calls at which two graphs first differ in an output.

    Call `wanted` computes this output in the reference, and call `other` in the candidate.
    """
    sides = reference, candidate
    known = [side.computed for side in sides]
    # For each side, the calls behind the output that have no partner on the other side.
    alone = [
        [i for i in _behind(side, root) if not _has_partner(side.table, side.values[i], known[1 - place])]
        for place, (side, root) in enumerate(zip(sides, (wanted, other), strict=True))
    ]
    added = [[i for i in calls if side.graph.calls[i].op == _ADD] for side, calls in zip(sides, alone, strict=True)]
    # As many additions on each side: they were probably moved, not added.
    was_moved = len(added[0]) == len(added[1]) <= _MOST
    every = [_starts(side, own, there) for side, there, own in zip(sides, known[::-1], alone, strict=True)]
    starts = [own[:_MOST] for own in every]
    changed = _changed(sides, starts)
    first = [
        tuple(_shown(side, i, changed.get((place, i), ())) for i in starts[place]) for place, side in enumerate(sides)
    ]
    moved: list[tuple[Shown, ...]] = [(), ()]
    if was_moved:
        moved = [tuple(_shown(side, i) for i in calls) for side, calls in zip(sides, added, strict=True)]
    # An opaque operator on other shapes may come after the few starts that are shown.
    return FirstDifferences((first[0], first[1]), (moved[0], moved[1]), _reshaped(sides, every))


def _reshaped(sides: tuple[Canonicalizer, Canonicalizer], starts: list[list[int]]) -> tuple[Shown, Shown] | None:
    found: list[dict[str, int]] = []
    for side, own in zip(sides, starts, strict=True):
        calls = side.graph.calls
        opaque = [i for i in own if isinstance(calls[i].value, Tensor) and _is_opaque(calls[i], calls)]
        # Reversed, so that the first call of each operator wins.
        found.append({calls[i].op: i for i in reversed(opaque)})
    for op, index in found[0].items():
        if op in found[1]:
            one, other = _shown(sides[0], index), _shown(sides[1], found[1][op])
            # Calls whose results have other numbers of dims are hardly counterparts.
            if one.shape != other.shape and len(one.shape) == len(other.shape):
                return one, other
    return None


def _starts(side: Canonicalizer, alone: list[int], known: set[int]) -> list[int]:
    """Return the indices of the calls at which a graph begins to differ from the other graph, in ascending order.

    - `side`: the graph with its terms.
    - `alone`: the indices of the calls whose value the other graph does not compute.
    - `known`: the indices of the terms that the other graph computes.

    The result has the calls of `alone` that depend on no other call of `alone`. Inputs are left out, and dependencies
    on in-place calls do not count. Earlier calls that only reorder elements are added, such as a concatenation in
    another order.
    """
    calls = side.graph.calls
    # An input that is written has the term of its new value, so it would look different from the start.
    lonely = {i for i in alone if calls[i].op != "input" and not calls[i].writes}
    # A start is alone itself, but reads no lonely call.
    starts = [i for i in alone if calls[i].op != "input" and not lonely.intersection(side.reads[i])]
    # A concatenation of the same parts in another order is not in `alone`, since its parts are known. But a matrix
    # product that reads it, several casts and sums later, is. So go back through all calls whose own term is unknown.
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
    value = side.values[index]
    return isinstance(value, int) and value not in known


def row_splits(reference: Canonicalizer, candidate: Canonicalizer) -> tuple[str, ...]:
    """Return the names of operators that one graph calls on a whole tensor, and the other graph on its two halves.

    No rule proves such calls equal. Operators that a rule can rewrite are left out.
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
            # `two` is the side that runs the operator twice as often, on halves.
            if len(two[key]) == 2 * len(one[key]) and any(_is_half(h, w) for w in one[key] for h in shapes):
                found[key[0].removeprefix("aten.").removesuffix(".default")] = None
    return tuple(sorted(found))


_MOVES = names(lambda row: row.moves or row.is_constant)
"""Operators that create or move elements, by name without overload. They may be split, but are never the cause."""


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
    match table[place]:
        case _ if place in known:
            return True
        # The other graph may compute the parts, and never join them.
        case ("cat", places, _):
            return all(_is_known(table, part, known) for part in places)
        case ("view", base, *_):
            return _is_known(table, base, known)
    return False


def _behind(side: Canonicalizer, root: int) -> list[int]:
    seen, stack = set(), [root]
    while stack:
        index = stack.pop()
        if index not in seen:
            seen.add(index)
            stack.extend(side.reads[index])
            # A write after `root` does not reach it, unless `root` is an input whose final value is the output.
            stack.extend(writer for writer in side.memory.writers(index) if writer <= root or index == root)
    return sorted(seen)


def _changed(
    sides: tuple[Canonicalizer, Canonicalizer], starts: list[list[int]]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Compare each call in `starts` with its counterpart in the other graph. Returns the differing arguments.

    - The result maps (0 for the reference or 1 for the candidate, call index) to texts such as "dim 1".
    - Two calls are counterparts if each is the only call in its graph's `starts` with this operator, module and
      direction.
    - Calls without a counterpart are left out.
    """
    by_place: tuple[dict[Any, list[int]], dict[Any, list[int]]] = ({}, {})
    for found, side, own in zip(by_place, sides, starts, strict=True):
        for index in own:
            call = side.graph.calls[index]
            origin = CallOrigin(*call.place)
            found.setdefault((call.op, origin.module, origin.direction), []).append(index)
    changed: dict[tuple[int, int], tuple[str, ...]] = {}
    for key in by_place[0].keys() & by_place[1].keys():
        # With several calls, it is unknown which of them belong together.
        if len(by_place[0][key]) == len(by_place[1][key]) == 1:
            pair = by_place[0][key][0], by_place[1][key][0]
            args = [dict(side.graph.calls[i].args) for side, i in zip(sides, pair, strict=True)]
            for place in (0, 1):
                changed[place, pair[place]] = tuple(
                    f"{name} {_argument(sides[place], args[place].get(name))}"
                    for name in dict.fromkeys([*args[0], *args[1]])
                    if not _same_argument(sides, args[0].get(name), args[1].get(name))
                )
    return changed


def _same_argument(sides: tuple[Canonicalizer, Canonicalizer], one: Any, other: Any) -> bool:
    match one, other:
        case ("node", i), ("node", j):
            return sides[0].values[i] is not None and bool(sides[0].values[i] == sides[1].values[j])
        case ("list", *some), ("list", *others) if len(some) == len(others):
            return all(_same_argument(sides, x, y) for x, y in zip(some, others, strict=True))
    return bool(one == other)


def _argument(side: Canonicalizer, value: Any) -> str:
    match value:
        case None:
            return "left out"
        case ("node", index):
            return f"`{side.graph.calls[index].name}`"
        case ("list", *items):
            return f"[{', '.join(_argument(side, x) for x in items)}]"
        case ("float", text):
            return repr(float.fromhex(text))
        case ("none",):
            return "None"
        case ("size", *_):
            return _size(value)
        case (str(), text):
            return str(text)
    return str(value)


def _size(size: Any) -> str:
    if not isinstance(size, tuple):
        return str(size)
    products = (" * ".join([*([str(n)] if n != 1 or not names else []), *names]) for n, *names in size[1:])
    return " + ".join(products) or "0"


def _shown(side: Canonicalizer, index: int, changed: tuple[str, ...] = ()) -> Shown:
    call = side.graph.calls[index]
    shape = tuple(map(_size, call.value.shape)) if isinstance(call.value, Tensor) else ()
    operator = call.op.removesuffix(".default")
    origin = CallOrigin(*call.place)
    beside = _beside(side, index) if origin.module is None and origin.source is None else None
    return Shown(operator, call.name, *origin, shape, beside, changed)


def _beside(side: Canonicalizer, index: int) -> str | None:
    calls = side.graph.calls
    behind = [f"`{calls[read].name}`" for read in calls[index].reads]
    readers = (f"`{call.name}`{_within(call)}" for call in calls[index + 1 :] if index in call.reads)
    reader = next(readers, None)
    neighbours = [f"of {', '.join(behind)}{_within(calls[calls[index].reads[0]])}"] if behind else []
    neighbours += [f"read by {reader}"] if reader else []
    # For example "of `cat_3`, read by `mm_7` in layers.1 (forward)".
    return ", ".join(neighbours) or None


def _within(call: Call) -> str:
    origin = CallOrigin(*call.place)
    return f" in {origin.module} ({origin.direction})" if origin.module else ""
