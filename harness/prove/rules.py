"""The rules that rewrite terms. Each keeps every bit, and says why; none is about real numbers.

Together they have one aim: whatever moves elements without computing anything ends up in one form, namely a
concatenation of element-by-element operators of windows of what is left. They go strictly inwards, so they end.

"Exact" is an operator that gives each element of its result from the elements at the same place alone, by one
correctly rounded operation, so that neither layout nor neighbours count (see `operators.py` for which, and
docs/explanation/proving.md for what that assumes of a machine). A NaN's sign and payload are not covered: operands may
change places.
"""

from __future__ import annotations

import math

from bitproof.harness.prove.known_operators import COMMUTING, FLIP, FLOATS, WHOLE, holds
from bitproof.harness.prove.proof_data import Term
from bitproof.harness.prove.terms import Rule, Table
from bitproof.harness.prove.windows import Window, coalesced, composed, cut, joined, row_major, whole

# -- views: which elements are shown ------------------------------------------------------------------


def view_of_whole(table: Table, term: Term) -> int | None:
    """A window that shows all elements in their order, in their shape, is what it shows."""
    _, place, *w = term
    return place if tuple(w) == whole(table.shape(place)) else None


def view_of_view(table: Table, term: Term) -> int | None:
    """Showing elements of what shows elements shows elements: nothing is computed, so dtypes do not matter."""
    _, place, *w = term
    if table[place][0] != "view":
        return None
    _, base, *inner = table[place]
    window = composed(Window(*inner), Window(*w))
    return None if window is None else table.view(base, window)


def view_of_same_order(table: Table, term: Term) -> int | None:
    """A window counts elements in row-major order, so of what it looks at only their order matters, not the shape."""
    _, place, *w = term
    if table[place][0] != "view":
        return None
    _, base, *inner = table[place]
    flat = coalesced(Window(*inner))
    return None if flat == tuple(inner) else table.view(table.view(base, flat), Window(*w))


def view_of_exact(table: Table, term: Term) -> int | None:
    """An exact operator may be applied to the elements that are shown alone: all its operands have the result's shape,
    so the same window shows the same places in each. Not so for others, whose kernels see layouts."""
    _, place, *w = term
    if table[place][0] != "exact" or table.open_shape(place) is None:
        return None
    *operator, operands = table[place]
    return table.make((*operator, tuple(table.view(x, Window(*w)) for x in operands)))


def view_of_cat(table: Table, term: Term) -> int | None:
    """Elements of a concatenation are elements of its parts. Where a window comes through several parts, one of its
    dims does, and what it shows of each part follows along that dim; any other window is left alone."""
    _, place, *w = term
    if table[place][0] != "cat":
        return None
    _, parts, dim = table[place]
    found = cut(Window(*w), [table.shape(part) for part in parts], dim)
    if found is None:
        return None
    along, pieces = found
    shown = [table.view(parts[piece.part], piece.window) for piece in pieces]
    result = shown[0] if along is None else table.make(("cat", tuple(shown), along))
    hints = tuple((piece.part, tuple(piece.window)) for piece in pieces)
    table.hint = (hints,) if along is None else (hints, along)
    return result


# -- concatenations -----------------------------------------------------------------------------------


def cat_of_nothing(table: Table, term: Term) -> int | None:
    """A part without elements adds nothing along the dim; one part alone is the whole, be it without elements too."""
    _, parts, dim = term
    kept = tuple(part for part in parts if table.shape(part)[dim]) or parts[:1]
    if len(kept) == 1:
        return kept[0]
    return None if len(kept) == len(parts) else table.make(("cat", kept, dim))


def cat_of_cat(table: Table, term: Term) -> int | None:
    """A concatenation along a dim of one along the same dim is one of all parts, in order."""
    _, parts, dim = term
    flat: list[int] = []
    for part in parts:
        inner = table[part]
        flat += inner[1] if inner[0] == "cat" and inner[2] == dim else [part]
    return None if len(flat) == len(parts) else table.make(("cat", tuple(flat), dim))


def cat_of_neighbours(table: Table, term: Term) -> int | None:
    """Two windows of one term that follow one another are one window; so are one exact operator's results, where its
    operands are that in turn. The windows' steps along the dim must agree, and the second begin where the first ends.

    It is enough that the one shows first the one and then the other, and that is what a checker looks at.
    """
    _, parts, dim = term
    for index in range(len(parts) - 1):
        pair = parts[index], parts[index + 1]
        both = _join(table, *pair, dim)
        if both is not None and _shown(table, both, dim, [table.shape(part)[dim] for part in pair]) == pair:
            result = table.make(("cat", (*parts[:index], both, *parts[index + 2 :]), dim))
            table.hint = (index, both)
            return result
    return None


def _shown(table: Table, place: int, dim: int, sizes: list[int]) -> tuple[int, ...]:
    """Parts of a term with these sizes along a dim, one after the other."""
    shape, begin, found = table.shape(place), 0, []
    for size in sizes:
        here = Window((*shape[:dim], size, *shape[dim + 1 :]), row_major(shape), begin * row_major(shape)[dim])
        found.append(table.view(place, here))
        begin += size
    return tuple(found)


def _join(table: Table, first: int, second: int, dim: int) -> int | None:
    key = first, second, dim
    if key not in table.joins:
        table.joins[key] = _joined(table, first, second, dim)
    return table.joins[key]


def _joined(table: Table, first: int, second: int, dim: int) -> int | None:
    one, two = table[first], table[second]
    if one[0] == two[0] == "exact" and one[:4] == two[:4] and len(one[4]) == len(two[4]):
        orders = [two[4], two[4][::-1]] if one[1] in COMMUTING else [two[4]]
        for order in orders:
            pairs: list[int] = []
            for a, b in zip(one[4], order, strict=True):
                if (pair := _join(table, a, b, dim)) is None:
                    break
                pairs.append(pair)
            else:
                return table.make((*one[:4], tuple(pairs)))
        return None
    (base, a), (other, b) = table.as_window(first), table.as_window(second)
    window = joined(a, b, dim) if base == other else None
    return None if window is None else table.view(base, window)


# -- exact operators ----------------------------------------------------------------------------------


def exact_of_number(table: Table, term: Term) -> int | None:
    """A number's negative is a number, and so is what it is cast to, where that dtype has it: nothing is rounded."""
    _, name, dtype, _, operands = term
    number = table.number(operands[0])
    if number is None or name not in ("neg", "cast"):
        return None
    if name == "neg":
        number = -number if dtype in FLOATS else 0 - number  # no whole number is -0.0
    return table.filled(table.shape(operands[0]), dtype, number) if holds(dtype, number) else None


def exact_of_neutral(table: Table, term: Term) -> int | None:
    """x * 1 is x, and so are x + -0.0 and, of whole numbers, x + 0: nothing is rounded. x + 0.0 has no rule, as
    it makes +0.0 of -0.0."""
    _, name, dtype, _, operands = term
    for x, other in zip(operands, operands[::-1], strict=True):
        number = table.number(other)
        if (name, number) == ("mul", 1):
            return x
        if number == 0 and name == "add" and (dtype in WHOLE or math.copysign(1, number) < 0):
            return x
    return None


def exact_difference(table: Table, term: Term) -> int | None:
    """a - b is a + -b, the sign of a zero included: so IEEE 754 defines it. Where both are equal, -(a - b) is -0.0 and
    b - a is +0.0."""
    _, name, dtype, device, operands = term
    if name != "sub":
        return None
    negative = table.make(("exact", "neg", dtype, device, operands[1:]))
    return table.make(("exact", "add", dtype, device, (operands[0], negative)))


def exact_twice(table: Table, term: Term) -> int | None:
    """x + x is x * 2: both round the same number. Of more summands x, each rounds."""
    _, name, dtype, device, operands = term
    if name != "add" or operands != operands[:1] * 2 or table.open_shape(operands[0]) is None:
        return None
    two = table.filled(table.shape(operands[0]), dtype, 2.0)
    return table.make(("exact", "mul", dtype, device, (operands[0], two)))


def exact_of_neg(table: Table, term: Term) -> int | None:
    """-(-x) is x; a product's sign is that of its factors, and rounding to nearest is the same on either side of 0, so
    a sign goes past a product or a cast, and a number's sign is one. Not past a sum: -a + a is +0.0 where -(a + -a) is
    -0.0."""
    _, name, dtype, device, operands = term
    if name not in ("neg", "mul", "cast"):
        return None
    for index, x in enumerate(operands):
        if (plain := _without_sign(table, x)) is None:
            continue
        if name == "neg":
            return plain
        made = table.make((*term[:4], (*operands[:index], plain, *operands[index + 1 :])))
        return table.make(("exact", "neg", dtype, device, (made,)))
    return None


def _without_sign(table: Table, place: int) -> int | None:
    """The operand of a negation, or the opposite of a negative number; None for any other term."""
    if table[place][:2] == ("exact", "neg"):
        return int(table[place][4][0])
    number = table.number(place)
    if number is None or math.copysign(1, number) > 0:
        return None
    return table.filled(table.shape(place), table.dtype(place), -number)


def exact_through_wider(table: Table, term: Term) -> int | None:
    """A cast to a dtype that has every number of the one before rounds nothing, so the next cast may do without it: to
    the first dtype it is no cast at all. bfloat16 and float16 have neither all of the other's numbers."""
    _, name, dtype, device, operands = term
    inner = table[operands[0]]
    if name != "cast" or inner[:2] != ("exact", "cast"):
        return None
    x = inner[4][0]
    source = table.dtype(x)
    if inner[2] not in _WIDER.get(source, ()):
        return None
    return int(x) if source == dtype else table.make(("exact", "cast", dtype, device, (x,)))


_WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""The dtypes that have every number of one: as many digits or more, and the same exponents or more."""


def exact_of_one_choice(table: Table, term: Term) -> int | None:
    """A choice between x and x is x, and one whose condition is a number is known."""
    if term[1] != "where":
        return None
    condition, yes, no = term[4]
    if yes == no:
        return int(yes)
    number = table.number(condition)
    return None if number is None else int(yes if number else no)


def exact_in_order(table: Table, term: Term) -> int | None:
    """a + b and b + a round the same sum, a * b and b * a the same product, the sign of a zero included: all but
    NaNs agree. (a + b) + c is not a + (b + c), and a - b not b - a: those have no rule."""
    *operator, operands = term
    if term[1] not in COMMUTING or operands == tuple(sorted(operands)):
        return None
    return table.make((*operator, tuple(sorted(operands))))


def exact_of_cat(table: Table, term: Term) -> int | None:
    """An exact operator of a concatenation is the concatenation of it on each part and on what stands there in its
    other operands."""
    *operator, operands = term
    cats = [x for x in operands if table[x][0] == "cat"]
    if not cats:
        return None
    _, parts, dim = table[cats[0]]
    sizes = [table.shape(part)[dim] for part in parts]
    places = zip(*(_shown(table, x, dim, sizes) for x in operands), strict=True)
    return table.make(("cat", tuple(table.make((*operator, here)) for here in places), dim))


# -- collectives --------------------------------------------------------------------------------------


def gather_of_view(table: Table, term: Term) -> int | None:
    """All ranks run one program, so what one shows of a tensor all show: gathering moves elements and no more."""
    _, place, ranks = term
    if table[place][0] != "view" or table.open_shape(table[place][1]) is None:
        return None
    _, base, shape, strides, offset = table[place]
    everywhere = table.make(("gather", base, ranks))
    size = math.prod(table.shape(base))
    return table.view(everywhere, Window((len(ranks[0]), *shape), (size, *strides), offset))


def gather_of_exact(table: Table, term: Term) -> int | None:
    """What each rank computes element by element, it computes on what was gathered as well."""
    _, place, ranks = term
    if table[place][0] != "exact":
        return None
    *operator, operands = table[place]
    return table.make((*operator, tuple(table.make(("gather", x, ranks)) for x in operands)))


def gather_of_cat(table: Table, term: Term) -> int | None:
    """Parts that every rank joins and gathers are gathered parts, joined; the ranks are a new first dim."""
    _, place, ranks = term
    if table[place][0] != "cat":
        return None
    _, parts, dim = table[place]
    return table.make(("cat", tuple(table.make(("gather", part, ranks)) for part in parts), dim + 1))


def reduce_of_cat(table: Table, term: Term) -> int | None:
    """A reduction over ranks of (W, n) columns, some of one tensor and some of another, reduces each column.

    Only where a column is summed in an order that does not depend on how many columns there are or where it stands:
    the certificate lists that as an assumption. gloo's sums in rank order, as this project makes them, keep it; NCCL
    promises no such thing.
    """
    _, place, operation, ranks = term
    if table[place][0] != "cat" or table[place][2] != 1:
        return None
    parts = table[place][1]
    return table.make(("cat", tuple(table.make(("reduce", part, operation, ranks)) for part in parts), 0))


# -- elements in other places --------------------------------------------------------------------------


def move_of_flip(table: Table, term: Term) -> int | None:
    """What is reversed twice along the same dims is in its places again."""
    _, operator, arguments, _, shape = term
    if operator != FLIP:
        return None
    inner = table[dict(arguments)["self"][1]]
    if inner[:2] != ("move", FLIP):
        return None
    dims = [{dim % len(shape) for dim in dict(given)["dims"][1:]} for given in (arguments, inner[2])]
    return int(dict(inner[2])["self"][1]) if dims[0] == dims[1] else None


RULES: dict[str, list[Rule]] = {
    "view": [view_of_whole, view_of_view, view_of_same_order, view_of_exact, view_of_cat],
    "cat": [cat_of_nothing, cat_of_cat, cat_of_neighbours],
    "exact": [
        *(exact_of_number, exact_of_neutral, exact_of_neg, exact_difference, exact_twice),
        *(exact_through_wider, exact_of_one_choice, exact_in_order, exact_of_cat),
    ],
    "move": [move_of_flip],
    "gather": [gather_of_view, gather_of_exact, gather_of_cat],
    "reduce": [reduce_of_cat],
}
