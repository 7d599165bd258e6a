"""Each rule of rewriting, applied once: the term that a step's term must equal. harness/prove/rules.py argues them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from harness.certificate import windows
from harness.certificate.data import Term


class Terms:
    """The steps that were checked so far: terms, what each equals, and shapes."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.equals: list[int] = []
        self.places: dict[Term, int] = {}
        self.used: set[int] = set()
        self._shapes: dict[int, tuple[int, ...]] = {}

    def find(self, term: Term) -> int:
        """The last form of a term that has a step. Raises KeyError for one that has none."""
        place = self.places[term]
        self.used |= {place, self.equals[place]}
        return self.equals[place]

    def view(self, place: int, w: windows.Window) -> int:
        """The last form of a window on a term."""
        return self.find(("view", place, *w))

    def dtype(self, place: int) -> str:
        """A term's dtype."""
        term = self.terms[place]
        match term[0]:
            case "view" | "gather" | "reduce":
                return self.dtype(term[1])
            case "cat":
                return self.dtype(term[1][0])
        return str(term[2] if term[0] == "exact" else term[-2])

    def shape(self, place: int) -> tuple[int, ...]:
        """A term's shape. Raises ValueError where a size depends on data."""
        if place not in self._shapes:
            self._shapes[place] = self._shape_of(place)
        return self._shapes[place]

    def _shape_of(self, place: int) -> tuple[int, ...]:
        term = self.terms[place]
        match term[0]:
            case "view":
                found = term[2]
            case "cat":
                parts = [self.shape(part) for part in term[1]]
                joined = sum(part[term[2]] for part in parts)
                found = (*parts[0][: term[2]], joined, *parts[0][term[2] + 1 :])
            case "exact":
                found = self.shape(term[4][0])
            case "gather":
                found = (len(term[2][0]), *self.shape(term[1]))
            case "reduce":
                found = self.shape(term[1])[1:]
            case _:
                found = term[-1]
        if not isinstance(found, tuple) or any(type(size) is not int for size in found):
            raise ValueError(f"term {place} has no shape that is numbers")
        return found


Rule = Callable[[Terms, Term], int | None]


def view_of_whole(t: Terms, term: Term) -> int | None:
    """All elements in their order."""
    return term[1] if term[2:] == windows.full(t.shape(term[1])) else None


def view_of_view(t: Terms, term: Term) -> int | None:
    """A window on a window."""
    kind, base, *inner = t.terms[term[1]]
    w = windows.within((inner[0], inner[1], inner[2]), term[2:]) if kind == "view" else None
    return None if w is None else t.view(base, w)


def view_of_same_order(t: Terms, term: Term) -> int | None:
    """A window on a window that counts the same elements in the same order."""
    kind, base, *inner = t.terms[term[1]]
    return t.view(t.view(base, windows.flat((inner[0], inner[1], inner[2]))), term[2:]) if kind == "view" else None


def view_of_exact(t: Terms, term: Term) -> int | None:
    """The same window on each operand."""
    kind, *operator, operands = t.terms[term[1]]
    return t.find((kind, *operator, tuple(t.view(x, term[2:]) for x in operands))) if kind == "exact" else None


def view_of_cat(t: Terms, term: Term) -> int | None:
    """A window on one part, or one on each part in turn."""
    kind, parts, dim = t.terms[term[1]]
    if kind != "cat" or 0 in term[2]:
        return None
    for along, found in windows.pieces(term[2:], [t.shape(part) for part in parts], dim):
        places = [("view", parts[part], *w) for part, w in found]
        if all(place in t.places for place in places):
            shown = tuple(t.find(place) for place in places)
            if along is None:
                return shown[0]
            if ("cat", shown, along) in t.places:
                return t.find(("cat", shown, along))
    return None


def cat_of_nothing(t: Terms, term: Term) -> int | None:
    """Parts without elements are left out; one part alone is the whole."""
    kept = tuple(part for part in term[1] if t.shape(part)[term[2]])
    if len(kept) == 1:
        return kept[0]
    return t.find(("cat", kept, term[2])) if kept and kept != term[1] else None


def cat_of_cat(t: Terms, term: Term) -> int | None:
    """Parts of parts, along one dim."""
    _, parts, dim = term
    inner = [t.terms[part] for part in parts]
    flat = tuple(x for part, own in zip(parts, inner, strict=True) for x in (own[1] if _is_cat(own, dim) else (part,)))
    return t.find(("cat", flat, dim)) if flat != parts else None


def _is_cat(term: Term, dim: int) -> bool:
    return bool(term[0] == "cat" and term[2] == dim)


def cat_of_neighbours(t: Terms, term: Term) -> int | None:
    """Two neighbours as one: any two of which one window is made, and whose result has a step."""
    _, parts, dim = term
    for place in range(len(parts) - 1):
        for both in _joined(t, parts[place], parts[place + 1], dim):
            shorter = ("cat", (*parts[:place], both, *parts[place + 2 :]), dim)
            if shorter in t.places:
                return t.find(shorter)
    return None


def _joined(t: Terms, first: int, second: int, dim: int) -> Iterator[int]:
    one, two = t.terms[first], t.terms[second]
    if one[0] == two[0] == "exact" and one[:4] == two[:4] and len(one[4]) == len(two[4]):
        for order in [two[4], two[4][::-1]] if one[1] in ("add", "mul") else [two[4]]:
            pairs = [next(_joined(t, a, b, dim), None) for a, b in zip(one[4], order, strict=True)]
            if (*one[:4], tuple(pairs)) in t.places:
                yield t.find((*one[:4], tuple(pairs)))
        return
    (base, a), (other, b) = _as_window(t, first), _as_window(t, second)
    w = windows.follows(a, b, dim) if base == other else None
    if w is not None and ("view", base, *w) in t.places:
        yield t.view(base, w)


def _as_window(t: Terms, place: int) -> tuple[int, Any]:
    term = t.terms[place]
    return (term[1], term[2:]) if term[0] == "view" else (place, windows.full(t.shape(place)))


def exact_in_order(t: Terms, term: Term) -> int | None:
    """Operands of sums and products in the order of their places."""
    ordered = (*term[:4], tuple(sorted(term[4])))
    return t.find(ordered) if term[1] in ("add", "mul") and ordered != term else None


def exact_of_cat(t: Terms, term: Term) -> int | None:
    """The operator on each part of its first concatenation, and on what stands there in its other operands."""
    cats = [x for x in term[4] if t.terms[x][0] == "cat"]
    if not cats:
        return None
    _, parts, dim = t.terms[cats[0]]
    shape = t.shape(cats[0])
    strides, begin, results = windows.steps_of(shape), 0, []
    for part in parts:
        size = t.shape(part)[dim]
        w = windows.normal((*shape[:dim], size, *shape[dim + 1 :]), strides, begin * strides[dim])
        results.append(t.find((*term[:4], tuple(t.view(x, w) for x in term[4]))))
        begin += size
    return t.find(("cat", tuple(results), dim))


def gather_of_view(t: Terms, term: Term) -> int | None:
    """What each rank shows, shown of what all hold."""
    kind, base, *inner = t.terms[term[1]]
    if kind != "view":
        return None
    shape, strides, offset = inner
    size = prod(t.shape(base))
    everywhere = t.find(("gather", base, term[2]))
    return t.view(everywhere, windows.normal((len(term[2][0]), *shape), (size, *strides), offset))


def gather_of_exact(t: Terms, term: Term) -> int | None:
    """The operator on what is gathered."""
    kind, *operator, operands = t.terms[term[1]]
    gathered = tuple(t.find(("gather", x, term[2])) for x in operands) if kind == "exact" else ()
    return t.find((kind, *operator, gathered)) if gathered else None


def gather_of_cat(t: Terms, term: Term) -> int | None:
    """Gathered parts, the ranks a new first dim."""
    kind, *rest = t.terms[term[1]]
    return (
        t.find(("cat", tuple(t.find(("gather", x, term[2])) for x in rest[0]), rest[1] + 1)) if kind == "cat" else None
    )


def reduce_of_cat(t: Terms, term: Term) -> int | None:
    """Each part's columns reduced: under the assumption of ascending ranks, element by element."""
    kind, *rest = t.terms[term[1]]
    if kind != "cat" or rest[1] != 1:
        return None
    return t.find(("cat", tuple(t.find(("reduce", x, *term[2:])) for x in rest[0]), 0))


RULES: dict[str, tuple[str, Rule]] = {
    rule.__name__: (rule.__name__.split("_of_")[0].split("_in_")[0], rule)
    for rule in (
        view_of_whole,
        view_of_view,
        view_of_same_order,
        view_of_exact,
        view_of_cat,
        cat_of_nothing,
        cat_of_cat,
        cat_of_neighbours,
        exact_in_order,
        exact_of_cat,
        gather_of_view,
        gather_of_exact,
        gather_of_cat,
        reduce_of_cat,
    )
}
"""Each rule, and the kind of term that it is about."""
