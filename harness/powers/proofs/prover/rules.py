"""The rules that rewrite terms. Each rule keeps every bit, and its docstring states why.

A rule returns the index of the rewritten term; None if the rule does not apply.

The rules move operators inwards, to element-by-element operators on views of the remaining terms. For example,
`cat(neg(x[:2]), neg(x[2:]))` becomes `neg(x)`.

An operator is called exact if each element of its result depends only on the elements at the same index, and is rounded
once, correctly. Only the sign and payload of a NaN may change, since operands may be exchanged.
"""

from __future__ import annotations

import math

from bitproof.harness.powers.proofs.prover.known_operators import COMMUTING, FLIP, FLOATS, WHOLE, holds
from bitproof.harness.powers.proofs.prover.proof_data import Term
from bitproof.harness.powers.proofs.prover.terms import Rule, Table
from bitproof.harness.powers.proofs.prover.windows import Window, coalesced, composed, cut, joined, row_major, whole

# -- views: the selected elements ---------------------------------------------------------------------


def view_of_whole(table: Table, term: Term) -> int | None:
    """Rule: a view that selects all elements, in the same order and shape, equals the term that it views."""
    _, place, *w = term
    return place if tuple(w) == whole(table.shape(place)) else None


def view_of_view(table: Table, term: Term) -> int | None:
    """Rule: a view of a view of x is a view of x. For example, `x[2:8][1:3]` becomes `x[3:5]`."""
    _, place, *w = term
    if table[place][0] != "view":
        return None
    _, base, *inner = table[place]
    window = composed(Window(*inner), Window(*w))
    return None if window is None else table.view(base, window)


def view_of_same_order(table: Table, term: Term) -> int | None:
    """Rule: `x[2:8].view(2, 3)[...]` becomes a view of `x[2:8]`, without the reshape.

    A window counts elements in row-major order, so the shape of the inner view does not matter.
    """
    _, place, *w = term
    if table[place][0] != "view":
        return None
    _, base, *inner = table[place]
    flat = coalesced(Window(*inner))
    return None if flat == tuple(inner) else table.view(table.view(base, flat), Window(*w))


def view_of_exact(table: Table, term: Term) -> int | None:
    """Rule: a view of an exact operator's result is the exact operator on views of its operands.

    For example, `(x + y)[:2]` is `x[:2] + y[:2]`. Other operators have no such rule, since their kernels may depend on
    layouts.
    """
    _, place, *w = term
    if table[place][0] != "exact" or table.open_shape(place) is None:
        return None
    *operator, operands = table[place]
    return table.make((*operator, tuple(table.view(x, Window(*w)) for x in operands)))


def view_of_cat(table: Table, term: Term) -> int | None:
    """Rule: a view of a concatenation is a concatenation of views of its parts, or a view of a single part.

    A view of several parts must cross from part to part along a single dim.
    """
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
    # The checker never searches, so it gets the pieces that `cut` found.
    hints = tuple((piece.part, tuple(piece.window)) for piece in pieces)
    table.hint = (hints,) if along is None else (hints, along)
    return result


# -- concatenations -----------------------------------------------------------------------------------


def cat_of_nothing(table: Table, term: Term) -> int | None:
    """Rule: a concatenation leaves out parts without elements. A concatenation of a single part is that part."""
    _, parts, dim = term
    kept = tuple(part for part in parts if table.shape(part)[dim]) or parts[:1]
    if len(kept) == 1:
        return kept[0]
    return None if len(kept) == len(parts) else table.make(("cat", kept, dim))


def cat_of_cat(table: Table, term: Term) -> int | None:
    """Rule: nested concatenations along the same dim become a single concatenation of all parts, in order."""
    _, parts, dim = term
    flat: list[int] = []
    for part in parts:
        inner = table[part]
        flat += inner[1] if inner[0] == "cat" and inner[2] == dim else [part]
    return None if len(flat) == len(parts) else table.make(("cat", tuple(flat), dim))


def cat_of_neighbours(table: Table, term: Term) -> int | None:
    """Rule: in a concatenation, adjacent windows of the same term are joined: `cat(x[:2], x[2:4])` is `x[:4]`.

    The windows must have equal strides. Results of an exact operator are joined if their operands can be joined.
    """
    _, parts, dim = term
    for index in range(len(parts) - 1):
        pair = parts[index], parts[index + 1]
        both = _join(table, *pair, dim)
        if both is not None and _consecutive_views(table, both, dim, [table.shape(part)[dim] for part in pair]) == pair:
            result = table.make(("cat", (*parts[:index], both, *parts[index + 2 :]), dim))
            # With this hint, the checker need not search for the term that has both windows.
            table.hint = (index, both)
            return result
    return None


def _consecutive_views(table: Table, place: int, dim: int, sizes: list[int]) -> tuple[int, ...]:
    """Return the indices of views of consecutive parts of a term along `dim`: x[0:2] and x[2:5] for `sizes` (2, 3)."""
    shape, begin, found = table.shape(place), 0, []
    for size in sizes:
        here = Window((*shape[:dim], size, *shape[dim + 1 :]), row_major(shape), begin * row_major(shape)[dim])
        found.append(table.view(place, here))
        begin += size
    return tuple(found)


def _join(table: Table, first: int, second: int, dim: int) -> int | None:
    # Cached, also for None: `cat_of_neighbours` tries the same pairs again after each join.
    key = first, second, dim
    if key not in table.joins:
        table.joins[key] = _joined(table, first, second, dim)
    return table.joins[key]


def _joined(table: Table, first: int, second: int, dim: int) -> int | None:
    one, two = table[first], table[second]
    if one[0] == two[0] == "exact" and one[:4] == two[:4] and len(one[4]) == len(two[4]):
        # Operands of both terms may have been sorted differently by `exact_in_order`.
        orders = [two[4], two[4][::-1]] if one[1] in COMMUTING else [two[4]]
        for order in orders:
            pairs: list[int] = []
            for a, b in zip(one[4], order, strict=True):
                if (pair := _join(table, a, b, dim)) is None:
                    break
                pairs.append(pair)
            # Only if no pair of operands failed.
            else:
                return table.make((*one[:4], tuple(pairs)))
        return None
    (base, a), (other, b) = table.as_window(first), table.as_window(second)
    window = joined(a, b, dim) if base == other else None
    return None if window is None else table.view(base, window)


# -- exact operators ----------------------------------------------------------------------------------


def exact_of_number(table: Table, term: Term) -> int | None:
    """Rule: the negation or cast of a number becomes the resulting number.

    The rule does not apply if the dtype cannot represent the resulting number exactly.
    """
    _, name, dtype, _, operands = term
    number = table.number(operands[0])
    if number is None or name not in ("neg", "cast"):
        return None
    if name == "neg":
        number = -number if dtype in FLOATS else 0 - number  # no whole number is -0.0
    return table.filled(table.shape(operands[0]), dtype, number) if holds(dtype, number) else None


def exact_of_neutral(table: Table, term: Term) -> int | None:
    """Rule: x * 1 is x, and x + -0.0 is x, since nothing is rounded. For integers, x + 0 is x as well.

    x + 0.0 has no rule, because -0.0 + 0.0 is +0.0.
    """
    _, name, dtype, _, operands = term
    for x, other in zip(operands, operands[::-1], strict=True):
        number = table.number(other)
        if (name, number) == ("mul", 1):
            return x
        if number == 0 and name == "add" and (dtype in WHOLE or math.copysign(1, number) < 0):
            return x
    return None


def exact_difference(table: Table, term: Term) -> int | None:
    """Rule: a - b is a + -b, including the sign of zeros, by IEEE 754.

    -(b - a) would be wrong: for equal a and b, -(b - a) is -0.0 but a - b is +0.0.
    """
    _, name, dtype, device, operands = term
    if name != "sub":
        return None
    negative = table.make(("exact", "neg", dtype, device, operands[1:]))
    return table.make(("exact", "add", dtype, device, (operands[0], negative)))


def exact_twice(table: Table, term: Term) -> int | None:
    """Rule: x + x is x * 2, since both round the same exact number. x + x + x is not x * 3, since each sum rounds."""
    _, name, dtype, device, operands = term
    if name != "add" or operands != operands[:1] * 2 or table.open_shape(operands[0]) is None:
        return None
    two = table.filled(table.shape(operands[0]), dtype, 2.0)
    return table.make(("exact", "mul", dtype, device, (operands[0], two)))


def exact_of_neg(table: Table, term: Term) -> int | None:
    """Rule: a negation moves out of a product or a cast, and -(-x) is x.

    - (-a) * b becomes -(a * b): the sign of a product depends only on the signs of its factors.
    - A cast of -x becomes the negation of the cast of x: rounding to nearest is symmetric around 0.
    - A factor -2 counts as the negation of 2.
    - A negation does not move out of a sum: -a + a is +0.0, but -(a + -a) is -0.0.
    """
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
    """Return the index of the term without its minus sign: x for `neg(x)`, 2 for -2 or a tensor filled with -2.

    None for any other term.
    """
    if table[place][:2] == ("exact", "neg"):
        return int(table[place][4][0])
    number = table.number(place)
    if number is None or math.copysign(1, number) > 0:
        return None
    return table.filled(table.shape(place), table.dtype(place), -number)


def exact_through_wider(table: Table, term: Term) -> int | None:
    """Rule: of two consecutive casts, the first is skipped if it casts to a wider dtype, since this changes no number.

    For example, bfloat16 -> float32 -> float16 is bfloat16 -> float16.
    """
    _, name, dtype, device, operands = term
    inner = table[operands[0]]
    if name != "cast" or inner[:2] != ("exact", "cast"):
        return None
    x = inner[4][0]
    source = table.dtype(x)
    # A cast to a narrower dtype rounds, and cannot be skipped.
    if inner[2] not in _WIDER.get(source, ()):
        return None
    return int(x) if source == dtype else table.make(("exact", "cast", dtype, device, (x,)))


_WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""For each dtype, the dtypes that represent all of its numbers, since their precision and range are at least as large.
"""


def exact_of_one_choice(table: Table, term: Term) -> int | None:
    """Rule: `where(c, x, x)` is x. `where(True, x, y)` is x, and `where(False, x, y)` is y."""
    if term[1] != "where":
        return None
    condition, yes, no = term[4]
    if yes == no:
        return int(yes)
    number = table.number(condition)
    return None if number is None else int(yes if number else no)


def exact_in_order(table: Table, term: Term) -> int | None:
    """Rule: operands of a sum or product are sorted, since a + b is b + a, including the sign of zeros.

    Only NaNs may differ. (a + b) + c is not a + (b + c), since each sum rounds.
    """
    *operator, operands = term
    if term[1] not in COMMUTING or operands == tuple(sorted(operands)):
        return None
    return table.make((*operator, tuple(sorted(operands))))


def exact_of_cat(table: Table, term: Term) -> int | None:
    """Rule: an exact operator on a concatenation is a concatenation of the operator's results on each part.

    For example, `cat(x, y) + z` is `cat(x + z[:2], y + z[2:])` if x has 2 rows.
    """
    *operator, operands = term
    cats = [x for x in operands if table[x][0] == "cat"]
    if not cats:
        return None
    _, parts, dim = table[cats[0]]
    sizes = [table.shape(part)[dim] for part in parts]
    places = zip(*(_consecutive_views(table, x, dim, sizes) for x in operands), strict=True)
    return table.make(("cat", tuple(table.make((*operator, here)) for here in places), dim))


# -- collectives --------------------------------------------------------------------------------------


def gather_of_view(table: Table, term: Term) -> int | None:
    """Rule: an all-gather of views is a view of the all-gather.

    This holds because all ranks run the same program, and gathering only moves elements.
    """
    _, place, ranks = term
    if table[place][0] != "view" or table.open_shape(table[place][1]) is None:
        return None
    _, base, shape, strides, offset = table[place]
    everywhere = table.make(("gather", base, ranks))
    # A rank's elements follow each other in the gathered term, so ranks are `size` elements apart.
    size = math.prod(table.shape(base))
    return table.view(everywhere, Window((len(ranks[0]), *shape), (size, *strides), offset))


def gather_of_exact(table: Table, term: Term) -> int | None:
    """Rule: an all-gather of an exact operator's result is the operator on all-gathered operands."""
    _, place, ranks = term
    if table[place][0] != "exact":
        return None
    *operator, operands = table[place]
    return table.make((*operator, tuple(table.make(("gather", x, ranks)) for x in operands)))


def gather_of_cat(table: Table, term: Term) -> int | None:
    """Rule: an all-gather of a concatenation along dim d is a concatenation of all-gathers along dim d + 1.

    An all-gather adds a first dim, which counts the ranks.
    """
    _, place, ranks = term
    if table[place][0] != "cat":
        return None
    _, parts, dim = table[place]
    return table.make(("cat", tuple(table.make(("gather", part, ranks)) for part in parts), dim + 1))


def reduce_of_cat(table: Table, term: Term) -> int | None:
    """Rule: a reduce-scatter of concatenated columns is a concatenation of reduce-scatters.

    The reduced term has a row for each rank. The rule assumes that all columns are summed in the same order, whatever
    their number and position. The certificate lists this assumption.

    - The sums in rank order that this project computes with gloo satisfy it.
    - NCCL does not promise it.
    """
    _, place, operation, ranks = term
    if table[place][0] != "cat" or table[place][2] != 1:
        return None
    parts = table[place][1]
    return table.make(("cat", tuple(table.make(("reduce", part, operation, ranks)) for part in parts), 0))


# -- elements at other indices -------------------------------------------------------------------------


def move_of_flip(table: Table, term: Term) -> int | None:
    """Rule: `x.flip(dims).flip(dims)` is x."""
    _, operator, arguments, _, shape = term
    if operator != FLIP:
        return None
    inner = table[dict(arguments)["self"][1]]
    if inner[:2] != ("move", FLIP):
        return None
    # As sets of numbers from 0 on, since the order of dims does not matter, and -1 is the last dim.
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
