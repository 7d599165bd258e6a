"""Terms with their steps and types, and each rewriting rule, applied once. prove/rules.py justifies the rules.

Every term has a type, derived from the types of its parts (types.py): a term whose parts do not fit is rejected, and a
step must not change its term's type. Rules may rely on that, and only deal with values.

A rule takes a term and the step's hint, and returns the last form of the rewritten term, which earlier steps must have
derived: looking up a term without a step raises KeyError. It returns None if it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import copysign, prod

from bitproof.harness.certificate import windows
from bitproof.harness.certificate.data import FLOATS, ROOTS, ProofStep, Term, terms_in
from bitproof.harness.certificate.errors import require
from bitproof.harness.certificate.types import Type, has, shape_of, type_of
from bitproof.harness.certificate.windows import Window

COMMUTING = ("add", "mul", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor")
WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
FLIP = "aten.flip.default"


class Terms:
    """The steps checked so far: each one's term, last form, type, and the ROOTS that it reads."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.equals: list[int] = []
        self.types: list[Type] = []
        self.roots: list[frozenset[str]] = []
        self.places: dict[Term, int] = {}

    def add(self, step: ProofStep) -> None:
        """Check one step: its term is new, its parts are in their last form and fit together, and its rule gives the
        stated term, of the same type."""
        place, term, below = len(self.terms), step.term, terms_in(step.term)
        require(term not in self.places, lambda: f"step {place} has a term that has one already")
        is_last = all([type(x) is int and 0 <= x < place and self.equals[x] == x for x in below])
        require(is_last, lambda: f"step {place} reads no last form")
        own_type = self.type_of(term)
        if step.rule:
            require(step.rule.split("_")[0] == term[0], lambda: f"step {place} applies {step.rule} to {term[0]}")
            found = RULES[step.rule](self, term, *step.hint)
            require(found is not None and found == step.equals, f"step {place} does not follow by {step.rule}")
            type_ = self.types[step.equals]
            require(type_ == own_type, lambda: f"step {place} rewrites {own_type} to {type_}")
        else:
            require(step.equals == place and not step.hint, lambda: f"step {place} rewrites its term by no rule")
        own = [kind for kind in ROOTS if term[0] == "input" and term[1].startswith(kind)]
        self.types.append(own_type)
        self.roots.append(frozenset(own).union(*[self.roots[x] for x in below]))
        self.terms.append(term)
        self.equals.append(step.equals)
        self.places[term] = place

    def type_of(self, term: Term) -> Type:
        """The type of a term, from the types of its parts. Raises RejectedError if they do not fit."""
        return type_of(term, self.types)

    def find(self, *term: object) -> int:
        """The last form of a term with a step. Raises KeyError for a term without one."""
        return self.equals[self.places[term]]

    def view(self, place: int, w: Window) -> int:
        """The last form of a window on a term."""
        return self.find("view", place, *w)

    def each(self, term: Term, places: Iterable[int]) -> tuple[int, ...]:
        """The last forms of a term's operation on another term, applied to each of these instead."""
        return tuple(self.find(term[0], x, *term[2:]) for x in places)

    def filled(self, like: int, dtype: str, value: float) -> int:
        """The last form of a tensor with a term's shape, filled with a number."""
        place, shape = self.find("number", dtype, value.hex()), self.shape(like)
        return self.view(place, windows.normal(shape, (0,) * len(shape), 0)) if shape else place

    def number(self, place: int) -> float | None:
        """The number that fills a term."""
        term = self.terms[self.as_window(place)[0]] if self.terms[place][0] == "view" else self.terms[place]
        return float.fromhex(term[2]) if term[0] == "number" else None

    def shape(self, place: int) -> tuple[int, ...]:
        """A term's shape. Raises RejectedError if a size depends on data, or the term is no tensor."""
        return shape_of(self.types[place])

    def as_window(self, place: int) -> tuple[int, Window]:
        """A term as a window on another: a view's own, or else the whole of it."""
        term = self.terms[place]
        return (term[1], term[2:]) if term[0] == "view" else (place, windows.full(self.shape(place)))


def view_of_whole(t: Terms, term: Term) -> int | None:
    """All elements in their order."""
    return term[1] if term[2:] == windows.full(t.shape(term[1])) else None


def view_of_view(t: Terms, term: Term) -> int | None:
    """A window on a window."""
    base, inner = t.as_window(term[1])
    w = windows.within(inner, term[2:]) if base != term[1] else None
    return None if w is None else t.view(base, w)


def view_of_same_order(t: Terms, term: Term) -> int | None:
    """A window on a window that counts the same elements in the same order."""
    base, inner = t.as_window(term[1])
    return t.view(t.view(base, windows.flat(inner)), term[2:]) if base != term[1] else None


def view_of_cat(t: Terms, term: Term, pieces: Sequence[tuple[int, Window]], along: int | None = None) -> int | None:
    """A window on one part, or consecutive windows on several along a dim. The hint lists pieces (a part and the window
    on it), which together must be the window on the whole."""
    _, place, *w = term
    require(t.terms[place][0] == "cat" and all(n >= 0 for n, _ in pieces), "a window on no part")
    parts, slots = t.terms[place][1], _slots(t, place)
    sizes = [1 if along is None else v[0][along] for _, v in pieces]
    seen = [windows.within(slots[number], v) for number, v in pieces]
    shown = tuple(t.view(parts[number], v) for number, v in pieces)
    if along is None:
        return shown[0] if seen == [(*w,)] else None
    return t.find("cat", shown, along) if seen == windows.parts((*w,), along, sizes) else None


def _slots(t: Terms, place: int) -> list[Window]:
    """The position of each part in a concatenation."""
    _, parts, dim = t.terms[place]
    return windows.parts(windows.full(t.shape(place)), dim, (t.shape(x)[dim] for x in parts))


def cat_of_nothing(t: Terms, term: Term) -> int | None:
    """Empty parts are left out, all but one if none has elements; a single part is the whole."""
    kept = tuple(x for x in term[1] if t.shape(x)[term[2]]) or term[1][:1]
    return kept[0] if len(kept) == 1 else t.find("cat", kept, term[2]) if kept != term[1] else None


def cat_of_cat(t: Terms, term: Term) -> int | None:
    """Parts of parts, along one dim."""
    _, parts, dim = term
    inner = [t.terms[x][1] if t.terms[x][::2] == ("cat", dim) else (x,) for x in parts]
    flat = tuple(x for several in inner for x in several)
    return t.find("cat", flat, dim) if flat != parts else None


def cat_of_neighbours(t: Terms, term: Term, place: int, both: int) -> int | None:
    """Two parts become one that contains both in order. The hint names the parts and the joined one."""
    _, parts, dim = term
    require(0 <= place < len(parts) - 1, f"{place} is no part that has another after it")
    sizes = [t.shape(x)[dim] for x in parts[place : place + 2]]
    shown = tuple(t.view(both, w) for w in windows.parts(windows.full(t.shape(both)), dim, sizes))
    is_both = shown == parts[place : place + 2]
    return t.find("cat", (*parts[:place], both, *parts[place + 2 :]), dim) if is_both else None


def exact_in_order(t: Terms, term: Term) -> int | None:
    """Sort the operands of a commutative operator by index."""
    ordered = (*term[:4], tuple(sorted(term[4])))
    return t.find(*ordered) if term[1] in COMMUTING and ordered != term else None


def exact_of_cat(t: Terms, term: Term) -> int | None:
    """Apply the operator to each part of its first concatenation, and to the same elements of its other operands."""
    place, *_ = (x for x in term[4] if t.terms[x][0] == "cat")
    pieces = (tuple(t.view(x, w) for x in term[4]) for w in _slots(t, place))
    return t.find("cat", tuple(t.find(*term[:4], operands) for operands in pieces), t.terms[place][2])


def exact_of_number(t: Terms, term: Term) -> int | None:
    """The negative of a number is a number, and so is a number cast to a dtype that has it."""
    _, name, dtype, _, (x, *_) = term
    value = t.number(x)
    if value is None or name not in ("neg", "cast"):
        return None
    value = value if name == "cast" else -value if dtype in FLOATS else 0 - value
    return t.filled(x, dtype, value) if has(dtype, value) else None


def exact_of_neutral(t: Terms, term: Term) -> int | None:
    """x * 1, a float plus -0.0, and an integer plus 0 are x."""
    _, name, dtype, _, operands = term
    neutral = {"mul": 1.0, "add": -0.0 if dtype in FLOATS else 0.0}.get(name)
    for x, other in zip(operands, operands[::-1], strict=True):
        value = t.number(other)
        if neutral is not None and value is not None and value.hex() == neutral.hex():
            return x
    return None


def exact_difference(t: Terms, term: Term) -> int | None:
    """A difference as the sum with the negative."""
    kind, name, *kinds, (first, *others) = term
    return t.find(kind, "add", *kinds, (first, t.find(kind, "neg", *kinds, (*others,)))) if name == "sub" else None


def exact_twice(t: Terms, term: Term) -> int | None:
    """x + x as x * 2."""
    kind, name, dtype, device, (x, *others) = term
    return t.find(kind, "mul", dtype, device, (x, t.filled(x, dtype, 2.0))) if (name, others) == ("add", [x]) else None


def exact_of_neg(t: Terms, term: Term) -> int | None:
    """-(-x) is x; the first sign within a product or a cast moves in front of it."""
    _, name, *kinds, operands = term
    for place, x in enumerate(operands if name in ("neg", "mul", "cast") else ()):
        value, plain = t.number(x), None
        if t.terms[x][:2] == ("exact", "neg"):
            plain = t.terms[x][4][0]
        elif value is not None and copysign(1, value) < 0:
            plain = t.filled(x, t.types[x][0], -value)
        if plain is not None:
            rest = t.find(*term[:4], windows.put(operands, place, plain)) if name != "neg" else plain
            return rest if name == "neg" else t.find("exact", "neg", *kinds, (rest,))
    return None


def exact_through_wider(t: Terms, term: Term) -> int | None:
    """A cast of an exact cast is a cast of the latter's operand, or the operand itself."""
    _, name, dtype, device, (below, *_) = term
    if name != "cast" or t.terms[below][:2] != ("exact", "cast"):
        return None
    x = t.terms[below][4][0]
    is_wider = t.types[below][0] in WIDER.get(t.types[x][0], ())
    return None if not is_wider else x if t.types[x][0] == dtype else t.find("exact", "cast", dtype, device, (x,))


def exact_of_one_choice(t: Terms, term: Term) -> int | None:
    """A choice between equal terms, or by a condition that is a number."""
    if term[1] != "where":
        return None
    value = t.number(term[4][0])
    return term[4][1] if term[4][1] == term[4][2] else None if value is None else term[4][1 if value else 2]


def move_of_flip(t: Terms, term: Term) -> int | None:
    """A second reversal along the same dims undoes the first."""
    x = dict(term[2])["self"][1]
    inner, dims = t.terms[x], []
    if term[1] != FLIP or inner[:2] != ("move", FLIP):
        return None
    for arguments in (term[2], inner[2]):
        require({name for name, _ in arguments} == {"self", "dims"}, "what is reversed has other arguments")
        dims.append({dim % len(term[4]) for dim in dict(arguments)["dims"][1:]})
    return dict(inner[2])["self"][1] if dims[0] == dims[1] else None


def of_exact(t: Terms, term: Term) -> int | None:
    """A view or gather of an exact operator's result is the operator on views or gathers of its operands."""
    kind, *operator, operands = t.terms[term[1]]
    return t.find(kind, *operator, t.each(term, operands)) if kind == "exact" else None


def gather_of_view(t: Terms, term: Term) -> int | None:
    """A gather of a view is a view of the gather."""
    base, (shape, strides, offset) = t.as_window(term[1])
    everywhere = windows.normal((len(term[2][0]), *shape), (prod(t.shape(base)), *strides), offset)
    return t.view(t.find("gather", base, term[2]), everywhere) if base != term[1] else None


def of_cat(t: Terms, term: Term) -> int | None:
    """A gather of a concatenation gathers each part, with ranks as a new first dim; a reduction reduces each column and
    removes the first dim, assuming sums in ascending rank order, element by element."""
    kind, *rest = t.terms[term[1]]
    if kind != "cat" or (term[0], rest[1]) == ("reduce", 0):
        return None
    return t.find("cat", t.each(term, rest[0]), rest[1] + (1 if term[0] == "gather" else -1))


RULES: dict[str, Callable[..., int | None]] = {
    **{rule.__name__: rule for rule in (view_of_whole, view_of_view, view_of_same_order, view_of_cat, gather_of_view)},
    **{rule.__name__: rule for rule in (cat_of_nothing, cat_of_cat, cat_of_neighbours, exact_in_order, exact_of_cat)},
    **{
        rule.__name__: rule for rule in (exact_of_number, exact_of_neutral, exact_difference, exact_twice, exact_of_neg)
    },
    **{rule.__name__: rule for rule in (exact_through_wider, exact_of_one_choice, move_of_flip)},
    **{"view_of_exact": of_exact, "gather_of_exact": of_exact, "gather_of_cat": of_cat, "reduce_of_cat": of_cat},
}
"""Each rule by its name, which starts with the kind of its terms."""
