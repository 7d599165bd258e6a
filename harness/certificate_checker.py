"""Checks a certificate: `python certificate_checker.py DIR`, with only Python's standard library.

A certificate proves that outputs of two graphs have equal bits. It has both graphs, and the steps of the proof. Each
step introduces a term, which describes a value, and may rewrite the term to an equal one. This file was written from
docs/reference/certificate.md, which defines the format and every rule, and follows its sections. It imports nothing of
this project, in particular not the prover.

Exit status: 0 the certificate is accepted and every output is proved, 1 an output is not, 3 it is rejected.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import stat
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import copysign, frexp, inf, isfinite, prod
from pathlib import Path
from typing import Any

FORMAT = 10
MOST_BYTES = 1 << 29
SIDES = ("reference", "candidate")
MAIN, SUMS = "certificate.json", "SHA256SUMS"
PARTS = ("reference.json", "candidate.json", "steps.json")
FILES = (MAIN, *PARTS)
REAL = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
WHOLE = {"int64": 8, "int32": 4}
BYTES = {**REAL, **WHOLE, "int16": 2}
NUMBER, STATE, SEVERAL = "number", "state", "several"
Json = Any
State = dict[str, Any]
"""The state after the steps so far, with these lists by index of a term.

- `terms`: the terms. Each is a list of its kind and parts, such as ["cat", [3, 5], 0].
- `last`: the index of the term to which a term is rewritten, or its own.
- `types`: the types of the terms.
- `roots`: prefixes of the names of inputs that a term depends on (see ROOTS).

`at` maps a term's text to its index.
"""


class RejectedError(Exception):
    """The certificate is wrong or damaged."""


class UnknownError(Exception):
    """No term can be derived for a call, so the call is refused. Outputs that depend on the call are REFUSED."""


def hold(holds: object, otherwise: str) -> None:
    """Raise RejectedError with the text `otherwise` if `holds` is false."""
    if not holds:
        raise RejectedError(otherwise)


MISTAKES = (OSError, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError, StopIteration)
"""Exceptions that Python raises for data of an unexpected form, such as a missing field."""


@contextmanager
def rejecting() -> Iterator[None]:
    """Context that turns the exceptions in MISTAKES into RejectedError."""
    try:
        yield
    except MISTAKES as error:
        raise RejectedError(f"{'it lacks' if type(error) is KeyError else type(error).__name__}: {error}") from error


line_of = repr
"""Write nested lists of numbers, strings and None as text. Different lists have different texts."""


# -- Terms and their types ---------------------------------------------------------------------------

# The functions below check the parts of a term: they return False, or raise, for an invalid part. They append the terms
# that the part refers to, and those that name symbols in its sizes, to the list `named`.


def _is_count(x: Json) -> bool:
    return type(x) is int and x >= 0


def _are_counts(x: Json) -> bool:
    return type(x) is list and {*map(type, x)} <= {int} and min(x, default=0) >= 0


def _sizes(x: Json, named: list[int]) -> bool:
    if _are_counts(x):
        return True
    return type(x) is list and all(_size(n, named) and (type(n) is list or n >= 0) for n in x)


def _size(x: Json, named: list[int]) -> bool:
    if type(x) is int:
        return True
    if type(x) is not list or x[:1] != ["size"]:
        return False
    # A product is a coefficient and the terms of its symbols.
    for product in x[1:]:
        hold(type(product) is list and product and {*map(type, product)} == {int}, f"{x} is no sum of products")
        named += product[1:]
    return True


def _shape(x: Json, named: list[int]) -> bool:
    return _are_counts(x) or (type(x) is list and all(n is None or _is_count(n) for n in x))


def _groups(x: Json, named: list[int] | None = None) -> bool:
    # All instances of a group have the same number of ranks, and no rank is in two of them.
    ranks = [rank for group in x for rank in group]
    return all(map(_is_count, ranks)) and len({len(g) for g in x}) == 1 and len({*ranks}) == len(ranks) > 0


def _term(x: Json, named: list[int]) -> bool:
    named.append(x)
    return type(x) is int


def _arguments(x: Json, named: list[int]) -> bool:
    return all(type(name) is str and _argument(value, named) for name, value in x)


def _argument(x: Json, named: list[int]) -> bool:
    if type(x) is int:
        return True
    if type(x) is not list or not x:
        raise RejectedError(f"{x} is no argument")
    word, *rest = x
    if word == "list":
        return all(_argument(item, named) for item in rest)
    if word == "size":
        return _size(x, named)
    if word == "value":
        return len(rest) == 1 and _term(rest[0], named)
    if word == "tensor":
        place, dtype, device, shape, strides, lead = rest
        are_sizes = _sizes(shape, named) and _sizes(strides, named) and _sizes([lead], named)
        return _term(place, named) and type(dtype) is type(device) is str and len(shape) == len(strides) and are_sizes
    if word == "ranks":
        return len(rest) == 1 and _groups(rest[0])
    if word in ("bool", "float", "str", "dtype", "device", "enum"):
        return len(rest) == 1 and type(rest[0]) is str
    return x == ["none"] or (word == "graph" and len(rest) == 1)


WORDS: dict[str, Callable[[Json, list[int]], bool]] = {
    "text": lambda x, named: type(x) is str,
    "text?": lambda x, named: x is None or type(x) is str,
    "side": lambda x, named: x in SIDES,
    "int": lambda x, named: type(x) is int,
    "count": lambda x, named: _is_count(x),
    "closed": lambda x, named: _are_counts(x),
    "shape": _shape,
    "shape?": lambda x, named: x is None or _shape(x, named),
    "sizes": _sizes,
    "groups": _groups,
    "term": _term,
    "terms": lambda x, named: type(x) is list and all(_term(t, named) for t in x),
    "arguments": _arguments,
}
"""For each word in GRAMMAR, a function that checks such a part of a term."""

GRAMMAR = {
    kind: words.split()
    for kind, words in {
        "input": "text text closed",
        "constant": "text text closed",
        "number": "text text",
        "view": "term closed closed int",
        "cat": "terms int",
        "exact": "text text text terms",
        "gather": "term groups",
        "reduce": "term text groups",
        "op": "text arguments text? shape?",
        "move": "text arguments text? shape?",
        "out": "term count text shape",
        "item": "term",
        "extent": "term count",
        "rows": "sizes",
        "seed": "",
        "draws": "term",
        "fresh": "side count text shape",
    }.items()
}


def terms_named(term: Json) -> list[int]:
    """Return the indices of the terms to which a term refers: [3, 5] for ["cat", [3, 5], 0].

    Raises RejectedError for an invalid term.
    """
    if type(term) is list and term and type(term[0]) is str and term[0] in GRAMMAR:
        words, named = GRAMMAR[term[0]], list[int]()
        fit = [WORDS[word](x, named) for word, x in zip(words, term[1:], strict=True)]
        if all(fit):
            return named
    raise RejectedError(f"no term: {str(term)[:80]}")


# A type is [dtype, shape] for a tensor, or NUMBER, STATE or SEVERAL. A size in a shape is None if it depends on data.
# Each function below returns the type of a term of one kind, from the types of earlier terms and the term's parts.


def _tensor(types: list[Json], t: int) -> list[Json]:
    if type(types[t]) is not list:
        raise RejectedError(f"term {t} is a {types[t]} and no tensor")
    return list(types[t])


def _closed(types: list[Json], t: int) -> list[int]:
    _, shape = _tensor(types, t)
    hold(None not in shape, f"a size of term {t} is open")
    return list(shape)


def _type_of_view(types: list[Json], t: int, shape: Json, strides: Json, offset: int) -> Json:
    elements = prod(_closed(types, t))
    hold(len(shape) == len(strides) and [shape, strides, offset] == normal(shape, strides, offset), "not normal")
    # Strides are not negative, so all element numbers are between the offset and `last`.
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    hold(0 in shape or 0 <= offset <= last < elements, "a window shows what is not there")
    return [types[t][0], shape]


def _type_of_cat(types: list[Json], parts: list[int], dim: int) -> Json:
    hold(parts, "a cat of no parts")
    shapes = [_closed(types, t) for t in parts]
    hold(0 <= dim < len(shapes[0]), f"no dim {dim}")
    # Parts have the same dtype, and the same sizes in all dims but this.
    hold(len({line_of([types[t][0], put(s, dim, 0)]) for t, s in zip(parts, shapes, strict=True)}) == 1, "no fit")
    return [types[parts[0]][0], put(shapes[0], dim, sum(shape[dim] for shape in shapes))]


def _type_of_exact(types: list[Json], operator: str, dtype: str, device: str, operands: list[int]) -> Json:
    given = [_tensor(types, t) for t in operands]
    hold(given and all(shape == given[0][1] for _, shape in given), "operands of other shapes")
    hold(takes(operator, dtype, [x for x, _ in given]), f"{operator} of {len(given)} operands to {dtype}")
    return [dtype, given[0][1]]


COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
TWO = ("add", "sub", "mul", *COMPARE, "bitwise_and", "bitwise_or", "bitwise_xor")


def takes(operator: str, own: str, dtypes: list[str]) -> bool:
    """Return whether an exact operator accepts operands of these dtypes and returns the dtype `own`.

    The result of an exact operator, such as add or cast, is the number nearest to the true result.
    """
    if operator == "cast":
        return len(dtypes) == 1 and own in REAL and dtypes[0] in REAL
    if operator == "where":
        return dtypes == ["bool", own, own] and (own in REAL or own in WHOLE or own == "bool")
    if operator not in ("neg", "bitwise_not", *TWO) or len(dtypes) != (2 if operator in TWO else 1):
        return False
    is_taken = dtypes[0] in WHOLE or dtypes[0] in ({"bool"} if operator.startswith("bitwise") else REAL)
    return is_taken and {*dtypes} == {dtypes[0]} and own == ("bool" if operator in COMPARE else dtypes[0])


def _type_of_number(types: list[Json], dtype: str, text: str) -> Json:
    value = float.fromhex(text)
    hold(value.hex() == text and has(dtype, value), f"{dtype} has no {text}")
    return [dtype, []]


def has(dtype: str, value: float) -> bool:
    """Return whether a dtype can represent a number: float32 has 0.5 but not 0.1, and int64 has no -0.0."""
    if dtype in REAL:
        return isfinite(value) and rounded(value, dtype) == value
    if not isfinite(value):
        return False
    # Numbers are floats here, so int64 ends at 2**53: floats have no larger odd integers. No integer is -0.0.
    limits = {"bool": (0, 1), "int32": (1 - 2**31, 2**31 - 1), "int64": (-(2**53), 2**53)}.get(dtype, (1, 0))
    return limits[0] <= value <= limits[1] and value == int(value) and not (value == 0 and copysign(1, value) < 0)


def rounded(value: float, dtype: str) -> float:
    """Round a number to a dtype; return infinity if it is too large. For bfloat16 it is truncated.

    For bfloat16, the caller only compares the result with `value`, to find out whether the dtype has this number.
    """
    try:
        if dtype == "bfloat16":
            # A bfloat16 number is the first half of a float32 number.
            return float(struct.unpack(">f", struct.pack(">f", value)[:2] + b"\0\0")[0])
        form = {"float64": ">d", "float32": ">f", "float16": ">e"}[dtype]
        return float(struct.unpack(form, struct.pack(form, value))[0])
    except OverflowError:
        return inf


def _type_of_reduce(types: list[Json], t: int, text: str, groups: Json) -> Json:
    shape = _closed(types, t)
    hold(len(shape) == 2 and shape[0] == len(groups[0]), "not each rank's columns")
    hold(text.split(" on ")[0].endswith(f" in {types[t][0]}"), f"{text} of {types[t][0]}")
    return [types[t][0], shape[1:]]


def _type_of_op(types: list[Json], kind: str, arguments: Json, dtype: Json, shape: Json) -> Json:
    for name, value in arguments:
        # Only the argument `generator` of an op may be the generator's state. Other values are tensors.
        _check_argument(types, value, name if (kind, name) == ("op", "generator") else kind)
    if dtype is None and shape is None:
        return SEVERAL
    hold(dtype is not None and shape is not None, "half a type")
    return [dtype, shape]


def _check_argument(types: list[Json], x: Json, where: str) -> None:
    """Raise RejectedError unless an argument states the types that its terms have.

    - `types`: the type of each term.
    - `where`: "generator" for the argument with the random generator's state; otherwise the kind of the term that has
      the argument.
    """
    if type(x) is int:
        return
    if x[0] == "list":
        for item in x[1:]:
            _check_argument(types, item, where)
    elif x[0] == "value":
        fits = type(types[x[1]]) is list if where == "move" else where == "generator" and types[x[1]] == STATE
        hold(fits, f"term {x[1]} is read as a value")
    elif x[0] == "tensor":
        shape = [n if type(n) is int else None for n in x[4]]
        if where != "op" or types[x[1]] != [x[2], shape]:
            raise RejectedError(f"term {x[1]} is read as {x[2]} {shape}")
        _check_symbols(types, (*x[4], *x[5], x[6]))
    elif x[0] == "size":
        _check_symbols(types, [x])


def _check_symbols(types: list[Json], sizes: Iterable[Json]) -> None:
    """Raise RejectedError unless each symbol in these sizes is the term of a number.

    `types` has the type of each term.
    """
    symbols = (t for size in sizes if type(size) is list for product in size[1:] for t in product[1:])
    hold(all(types[t] == NUMBER for t in symbols), "a size of what is no number")


def _type_of_out(types: list[Json], t: int, index: int, dtype: str, shape: Json) -> Json:
    hold(types[t] == SEVERAL, f"term {t} is not several")
    return [dtype, shape]


def _type_of_item(types: list[Json], t: int) -> Json:
    hold({*_tensor(types, t)[1]} <= {1, None}, "an item of several elements")
    return NUMBER


def _type_of_extent(types: list[Json], t: int, index: int) -> Json:
    # The shapes of several results are in their `out` terms, so for these the index is not checked here.
    is_open = types[t] == SEVERAL or (type(types[t]) is list and types[t][1][index : index + 1] == [None])
    hold(is_open, f"size {index} of term {t} is no matter of data")
    return NUMBER


def _type_of_rows(types: list[Json], sizes: Json) -> Json:
    _check_symbols(types, sizes)
    return NUMBER


def _type_of_draws(types: list[Json], t: int) -> Json:
    _tensor(types, t)
    return STATE


TYPES: dict[str, Callable[..., Json]] = {
    "input": lambda types, name, dtype, shape: [dtype, shape],
    "constant": lambda types, digest, dtype, shape: [dtype, shape],
    "number": _type_of_number,
    "view": _type_of_view,
    "cat": _type_of_cat,
    "exact": _type_of_exact,
    "gather": lambda types, t, groups: [_tensor(types, t)[0], [len(groups[0]), *_closed(types, t)]],
    "reduce": _type_of_reduce,
    "op": lambda types, operator, *parts: _type_of_op(types, "op", *parts),
    "move": lambda types, operator, *parts: _type_of_op(types, "move", *parts),
    "out": _type_of_out,
    "item": _type_of_item,
    "extent": _type_of_extent,
    "rows": _type_of_rows,
    "seed": lambda types: STATE,
    "draws": _type_of_draws,
    "fresh": lambda types, side, call, dtype, shape: STATE if [dtype, shape] == ["generator", []] else [dtype, shape],
}


# -- Windows -----------------------------------------------------------------------------------------

# A window [shape, strides, offset] on a tensor selects elements. At index i it has the tensor's element number
# offset + sum(i[k] * strides[k]), in row-major order. So [[3, 2], [1, 3], 0] is the transpose of a (2, 3) tensor.


def put(values: list[int], place: int, value: int) -> list[int]:
    return [*values[:place], value, *values[place + 1 :]]


def normal(shape: list[int], strides: list[int], offset: int) -> Json:
    """Return the window [shape, strides, offset] in normal form: equal windows become identical.

    A window without elements has only zeros, and a dim of size 1 has stride 0.
    """
    if 0 in shape:
        return [shape, [0] * len(shape), 0]
    return [shape, [0 if n == 1 else s for n, s in zip(shape, strides, strict=True)], offset]


def row_major(shape: list[int]) -> list[int]:
    """Return the strides of a row-major tensor, such as [12, 4, 1] for shape [2, 3, 4]."""
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return strides


def full(shape: list[int]) -> Json:
    """Return the window [shape, strides, offset] that selects all elements of a tensor, in order."""
    return normal(shape, row_major(shape), 0)


def parts_of(w: Json, dim: int, sizes: list[int]) -> Json:
    """Split a window along a dim into windows of these sizes; None if the sizes do not add up to the window's size."""
    (shape, strides, offset), found = w, []
    for size in sizes:
        found.append(normal(put(shape, dim, size), strides, offset))
        offset += size * strides[dim]
    return found if sum(sizes) == shape[dim] else None


def merged(dims: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring dims (size, stride, other stride) where possible, and leave out dims of size 1.

    Two neighbours are merged if a single dim addresses the same elements under both strides. For example, (2, 3, 30)
    and (3, 1, 10) become (6, 1, 10), since 3 = 3 * 1 and 30 = 3 * 10.
    """
    found: list[tuple[int, int, int]] = []
    for n, a, b in dims:
        if n == 1:
            continue
        if n and found and found[-1][1] == n * a and found[-1][2] == n * b:
            n *= found.pop()[0]
        found.append((n, a, b))
    return found


def flat(w: Json) -> Json:
    """Return the window with the fewest dims that selects the same elements in the same order."""
    if 0 in w[0]:
        return [[0], [0], 0]
    dims = merged(zip(w[0], w[1], w[1], strict=True))
    return [[n for n, _, _ in dims], [s for _, s, _ in dims], w[2]]


def translate(w: Json, shape: list[int], weights: list[int], others: list[int], more: int = 0) -> Json:
    """Convert a window from one numbering of a tensor's elements to another; None if the result is not a window.

    The element at index i has the old number sum(i[k] * weights[k]), and the new number more + sum(i[k] * others[k]).
    For example, `weights` are strides in memory, and `others` are row-major strides.
    """
    # A number is written in digits, one per dim, the largest weight first. The offset and each stride of the window are
    # converted digit by digit. That is right only if no index makes a digit reach the size of its dim: no carry.
    if 0 in w[0]:
        return normal(*w)
    if 0 in shape or min(w[2], *w[0], *w[1], 0) < 0:
        return None
    dims = sorted((d for d in merged(zip(shape, weights, others, strict=True)) if d[1]), key=lambda d: -d[1])
    reach, moved = [0] * len(dims), []
    # The offset counts once, and a stride as often as its dim has steps.
    for times, number in ((1, w[2]), *((n - 1, s) for n, s in zip(w[0], w[1], strict=True))):
        found = 0
        for k, (_, weight, other) in enumerate(dims):
            digit, number = number // weight, number % weight
            reach[k] += digit * times
            found += digit * other
        if number:
            return None
        moved.append(found)
    if any(far >= dim[0] for far, dim in zip(reach, dims, strict=True)):
        return None
    return normal(w[0], moved[1:], more + moved[0])


def after(v: Json, u: Json) -> Json:
    """Return the window that selects what `u` and then `v` select; None if no single window does."""
    return translate(v, u[0], row_major(u[0]), u[1], u[2])


def repeated(shape: list[int], to: list[int]) -> Json:
    """Return the window that broadcasts a tensor of shape `shape` to the shape `to`."""
    new = len(to) - len(shape)
    hold(new >= 0 and all(n in (1, m) for n, m in zip(shape, to[new:], strict=True)), f"{shape} is no {to}")
    return normal(to, [0] * new + full(shape)[1], 0)


# -- Rules -------------------------------------------------------------------------------------------

# A rule never searches: it computes the one term that must be equal, and looks it up among the steps. So a prover may
# choose which rules to apply, but it cannot add a false equality.


def new_state() -> State:
    return {"terms": [], "last": [], "types": [], "roots": [], "at": {}}


def take_step(state: State, step: Json) -> None:
    """Check the next step of a proof, and add it to the state.

    An invalid step raises RejectedError and changes nothing.

    A step is [term, rule, index of the resulting term], and may end with a hint for the rule.
    """
    hold(type(step) is list and len(step) in (3, 4) and type(step[1]) is str, "no step")
    term, rule, equals = step[:3]
    hint, place, last, types = step[3] if step[3:] else [], len(state["terms"]), state["last"], state["types"]
    hold(type(hint) is list and type(equals) is int, "no step")
    named, line = terms_named(term), line_of(term)
    # A step depends only on earlier steps, so there are no cycles; and each term has a single last form.
    if not all([0 <= t < place and last[t] == t for t in named]) or line in state["at"]:
        raise RejectedError(f"step {place} names no last form, or has a term that an earlier one has")
    own = TYPES[term[0]](types, *term[1:])
    # A rule's name begins with the kind of terms that it rewrites.
    if rule:
        if rule not in RULES or rule.partition("_")[0] != term[0]:
            raise RejectedError(f"step {place}: no rule {str(rule)[:80]} of {term[0]}")
        if bool(hint) != (rule in HINTED):
            raise RejectedError(f"step {place}: a hint too many, or none")
        if RULES[rule](state, term, *hint) != equals or equals == place or types[equals] != own:
            raise RejectedError(f"step {place} does not follow by {rule}, or changes its type")
    elif equals != place or hint:
        raise RejectedError(f"step {place} has no rule")
    roots = frozenset().union(*[state["roots"][t] for t in named])
    if term[0] == "input":
        roots |= {root for root in ROOTS if term[1].startswith(root)}
    for column, value in (("terms", term), ("last", equals), ("types", own), ("roots", roots)):
        state[column].append(value)
    state["at"][line] = place


ROOTS = ("parameter ", "input ")
"""Name prefixes of inputs. A proved output must depend on an input of each kind."""


def find(state: State, *term: Json) -> int:
    """Return the index of the term to which the proof rewrites the given term, or of the term itself.

    Raises RejectedError if no step of the proof has the term.
    """
    place = state["at"].get(line_of([*term]))
    if place is None:
        raise RejectedError(f"no step has the term {str(term)[:200]}")
    return int(state["last"][place])


def view(state: State, t: int, w: Json) -> int:
    """Return the index of the term to which the proof rewrites the view of term `t` by window `w`.

    Raises RejectedError if no step has this view.
    """
    return find(state, "view", t, *w)


def shape_of(state: State, t: int) -> list[int]:
    """Return the shape of a tensor's term. Raises RejectedError if a size depends on data."""
    return _closed(state["types"], t)


def number_of(state: State, t: int) -> float | None:
    """Return the number that a term is, or that it repeats (a view of a number); None for any other term."""
    term = state["terms"][t]
    term = state["terms"][term[1]] if term[0] == "view" else term
    return float.fromhex(term[2]) if term[0] == "number" else None


def filled(state: State, shape: list[int], dtype: str, value: float) -> int:
    """Return the index of the term of a tensor filled with a number.

    For shape [], this is the number itself, otherwise a view of it.
    """
    t = find(state, "number", dtype, value.hex())
    return view(state, t, [shape, [0] * len(shape), 0]) if shape else t


def positive_of(state: State, t: int) -> int | None:
    """Return the index of term `t` without its minus sign; None if `t` is neither a negation nor a negative number.

    For example, the index of 2 for -2.
    """
    term, value = state["terms"][t], number_of(state, t)
    if term[:2] == ["exact", "neg"]:
        return int(term[4][0])
    if value is None or copysign(1, value) > 0:
        return None
    return filled(state, shape_of(state, t), state["types"][t][0], -value)


def _inner(state: State, term: Json, kind: str) -> Json:
    inner = state["terms"][term[1]]
    hold(inner[0] == kind, f"{term[0]} of {inner[0]}, not of {kind}")
    return inner


def _places(state: State, t: int) -> list[Json]:
    """Return, for each part of a cat, the window that selects this part from the cat."""
    _, parts, dim = state["terms"][t]
    return list(parts_of(full(shape_of(state, t)), dim, [shape_of(state, x)[dim] for x in parts]))


def view_of_view(s: State, term: Json) -> int | None:
    """Return the single view that equals a view of a view; None if there is none."""
    _, x, *u = _inner(s, term, "view")
    w = after(term[2:], u)
    return None if w is None else view(s, x, w)


def view_of_same_order(s: State, term: Json) -> int | None:
    """Return a view of a view, with its inner view replaced by a view with the fewest dims.

    The inner view's shape has no effect, since only the order of its elements matters.
    """
    _, x, *u = _inner(s, term, "view")
    return view(s, view(s, x, flat(u)), term[2:])


def of_exact(s: State, term: Json) -> int | None:
    """Return the operator on views or gathers of its operands, for a view or gather of an exact operator's result."""
    *operator, operands = _inner(s, term, "exact")
    return find(s, *operator, [find(s, term[0], x, *term[2:]) for x in operands])


def view_of_cat(s: State, term: Json, pieces: Json, dim: int | None = None) -> int | None:
    """Return a view of a single part of a cat, or a cat of views of several parts, for a view of the cat.

    The step's hint is `pieces`, a list of [index of a part, window on this part], and `dim`. Several pieces are
    concatenated along `dim`. Returns None if the pieces are not the elements of the view.
    """
    parts, places = _inner(s, term, "cat")[1], _places(s, term[1])
    hold(pieces and all(_is_count(k) and k < len(parts) for k, _ in pieces), "no part")
    seen, shown = [after(v, places[k]) for k, v in pieces], [view(s, parts[k], v) for k, v in pieces]
    if dim is None:
        return shown[0] if seen == [term[2:]] else None
    hold(0 <= dim < len(term[2]), f"no dim {dim}")
    return find(s, "cat", shown, dim) if seen == parts_of(term[2:], dim, [v[0][dim] for _, v in pieces]) else None


def cat_of_nothing(s: State, term: Json) -> int | None:
    """Return a cat without its empty parts; if a single part is left, return that part."""
    _, parts, dim = term
    kept = [x for x in parts if shape_of(s, x)[dim]] or parts[:1]
    return kept[0] if len(kept) == 1 else find(s, "cat", kept, dim)


def cat_of_cat(s: State, term: Json) -> int | None:
    """Return a single cat for a cat of cats along the same dim."""
    inner = [s["terms"][x] for x in term[1]]
    parts = [t[1] if t[0] == "cat" and t[2] == term[2] else [x] for x, t in zip(term[1], inner, strict=True)]
    return find(s, "cat", [x for several in parts for x in several], term[2])


def cat_of_neighbours(s: State, term: Json, k: int, t: int) -> int | None:
    """Return a cat with term `t` instead of its parts `k` and `k + 1`; None if these do not make up `t`.

    The step's hint is `k` and `t`.
    """
    _, parts, dim = term
    hold(_is_count(k) and k + 1 < len(parts) and _is_count(t) and t < len(s["terms"]), "no neighbours")
    hold(s["last"][t] == t, "no last form")
    windows = parts_of(full(shape_of(s, t)), dim, [shape_of(s, x)[dim] for x in parts[k : k + 2]])
    shown = [view(s, t, w) for w in windows or ()]
    return find(s, "cat", [*parts[:k], t, *parts[k + 2 :]], dim) if shown == parts[k : k + 2] else None


COMMUTE = ("add", "mul", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor")
"""Exact operators whose operands may be exchanged."""


def exact_in_order(s: State, term: Json) -> int | None:
    """Return the term of a commutative operator with its operands sorted by their indices; None for other operators."""
    return find(s, *term[:4], sorted(term[4])) if term[1] in COMMUTE else None


def exact_of_cat(s: State, term: Json) -> int | None:
    """Return the cat of an exact operator's results on each part of a cat, for the operator on the cat.

    The other operands are split into parts of the same sizes.
    """
    first = next(x for x in term[4] if s["terms"][x][0] == "cat")
    parts = [find(s, *term[:4], [view(s, x, w) for x in term[4]]) for w in _places(s, first)]
    return find(s, "cat", parts, s["terms"][first][2])


def exact_of_number(s: State, term: Json) -> int | None:
    """Return the resulting number for a negation or cast of a number, or of a tensor filled with a number.

    Returns None for other operators and operands, and if the dtype cannot represent the number exactly.
    """
    _, name, dtype, _, operands = term
    value = number_of(s, operands[0])
    if value is None or name not in ("neg", "cast"):
        return None
    if name == "neg":
        value = 0.0 if value == 0 and dtype not in REAL else -value
    return filled(s, shape_of(s, operands[0]), dtype, value) if has(dtype, value) else None


def exact_of_neutral(s: State, term: Json) -> int | None:
    """Return x for x * 1, for x + -0.0 in a real dtype, and for x + 0 in an integer dtype; None for any other term.

    For real dtypes, x + 0.0 is not simplified, since -0.0 + 0.0 is +0.0.
    """
    neutral = {"mul": 1.0, "add": -0.0 if term[2] in REAL else 0.0}.get(term[1])
    if neutral is None:
        return None
    for x, other in (term[4], term[4][::-1]):
        value = number_of(s, other)
        # Compared as text, since -0.0 == 0.0 in Python.
        if value is not None and value.hex() == neutral.hex():
            return int(x)
    return None


def exact_difference(s: State, term: Json) -> int | None:
    """Return a + -b for a - b; None for any other term."""
    kind, name, dtype, device, operands = term
    if name != "sub":
        return None
    return find(s, kind, "add", dtype, device, [operands[0], find(s, kind, "neg", dtype, device, operands[1:])])


def exact_twice(s: State, term: Json) -> int | None:
    """Return x * 2 for x + x; None for any other term."""
    kind, name, dtype, device, operands = term
    if name != "add" or operands[0] != operands[1]:
        return None
    return find(s, kind, "mul", dtype, device, [operands[0], filled(s, shape_of(s, operands[0]), dtype, 2.0)])


def exact_of_neg(s: State, term: Json) -> int | None:
    """Return x for -(-x), and -(x * y) or -cast(x) for (-x) * y or cast(-x); None for any other term."""
    kind, name, dtype, device, operands = term
    for k, x in enumerate(operands if name in ("neg", "mul", "cast") else ()):
        plain = positive_of(s, x)
        if plain is not None and name == "neg":
            return plain
        if plain is not None:
            return find(s, kind, "neg", dtype, device, [find(s, *term[:4], put(operands, k, plain))])
    return None


WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""For each dtype, the wider dtypes, which can represent all of its numbers."""


def exact_through_wider(s: State, term: Json) -> int | None:
    """Return a cast of a cast without the inner cast, if its dtype is wider, so that it rounds nothing; else None."""
    inner = s["terms"][term[4][0]]
    if term[1] != "cast" or inner[:2] != ["exact", "cast"]:
        return None
    [x] = inner[4]
    source = s["types"][x][0]
    if inner[2] not in WIDER.get(source, ()):
        return None
    return int(x) if source == term[2] else find(s, *term[:4], [x])


def exact_of_one_choice(s: State, term: Json) -> int | None:
    """Return the value of a `where` with two equal values or with a constant condition; None for any other term."""
    if term[1] != "where":
        return None
    condition, yes, no = term[4]
    value = number_of(s, condition)
    return yes if yes == no else None if value is None else yes if value else no


def move_of_flip(s: State, term: Json) -> int | None:
    """Return x for x flipped twice along the same dims; None for any other term."""
    flip, rank = ["move", "aten.flip.default"], len(term[4])
    inner = s["terms"][dict(term[2])["self"][1]]
    if term[:2] != flip or inner[:2] != flip:
        return None
    both = [dict(term[2]), dict(inner[2])]
    hold(all({*each} == {"self", "dims"} for each in both), "another argument")
    one, other = ({dim % rank for dim in each["dims"][1:]} for each in both)
    return int(both[1]["self"][1]) if one == other else None


def gather_of_view(s: State, term: Json) -> int | None:
    """Return a view of a gather, for a gather of a view. A gather's first dim counts the ranks."""
    _, x, shape, strides, offset = _inner(s, term, "view")
    w = normal([len(term[2][0]), *shape], [prod(shape_of(s, x)), *strides], offset)
    return view(s, find(s, "gather", x, term[2]), w)


def of_cat(s: State, term: Json) -> int | None:
    """Return a cat of gathers for a gather of a cat, and a cat of reductions for a reduction of a cat along dim 1.

    Returns None for a reduction of a cat along another dim.
    """
    _, parts, dim = _inner(s, term, "cat")
    if term[0] == "reduce" and dim != 1:
        return None
    return find(s, "cat", [find(s, term[0], x, *term[2:]) for x in parts], dim + 1 if term[0] == "gather" else 0)


RULES: dict[str, Callable[..., int | None]] = {
    "view_of_whole": lambda s, term: term[1] if term[2:] == full(shape_of(s, term[1])) else None,
    "view_of_view": view_of_view,
    "view_of_same_order": view_of_same_order,
    "view_of_exact": of_exact,
    "view_of_cat": view_of_cat,
    "cat_of_nothing": cat_of_nothing,
    "cat_of_cat": cat_of_cat,
    "cat_of_neighbours": cat_of_neighbours,
    "exact_in_order": exact_in_order,
    "exact_of_cat": exact_of_cat,
    "exact_of_number": exact_of_number,
    "exact_of_neutral": exact_of_neutral,
    "exact_difference": exact_difference,
    "exact_twice": exact_twice,
    "exact_of_neg": exact_of_neg,
    "exact_through_wider": exact_through_wider,
    "exact_of_one_choice": exact_of_one_choice,
    "move_of_flip": move_of_flip,
    "gather_of_exact": of_exact,
    "gather_of_view": gather_of_view,
    "gather_of_cat": of_cat,
    "reduce_of_cat": of_cat,
}
HINTED = ("view_of_cat", "cat_of_neighbours")
"""Rules whose steps have a hint. Without a hint, they would have to search."""


# -- Calls -------------------------------------------------------------------------------------------

# The numbers of lines below are those of the page's section "Calls".

C10D = "_c10d_functional"
GATHER, REDUCE = f"{C10D}.all_gather_into_tensor.default", f"{C10D}.reduce_scatter_tensor.default"
EXCHANGE, ALL_REDUCE = f"{C10D}.all_to_all_single.default", f"{C10D}.all_reduce.default"
COLLECTIVES = (GATHER, REDUCE, EXCHANGE, ALL_REDUCE)
WAITS = {f"{C10D}.wait_tensor": "c", "bitproof.wait_offload": "offload", "bitproof.wait_reload": "reload"}
LAUNCHES = {name.rpartition(".")[0]: "c" for name in COLLECTIVES}
LAUNCHES |= {"bitproof.offload": "offload", "bitproof.reload": "reload", "ao.offload": "ao", "ao.reload": "ao"}
UNDERSTOOD = {*COLLECTIVES, f"{C10D}.wait_tensor.default"}
UNDERSTOOD |= {"higher_order.flex_attention", "higher_order.flex_attention_backward"}
REFUSED = ("aten.as_strided", "aten._reshape_alias", "aten.lift.", "_c10d_", "c10d.", "symm_mem.", "higher_order.")
COPIES = {f"aten.{name}.default" for name in ("_to_copy", "clone", "contiguous", "copy_")}
COPIES |= {"bitproof.offload.default", "bitproof.reload.default"}
EXACT = {"aten._to_copy.default": "cast", "aten.where.self": "where", "aten.neg_.default": "neg"}
EXACT |= {f"aten.{name}.default": name for name in ("neg", "bitwise_not")}
EXACT |= {f"aten.{name}.{end}": name for name in TWO for end in ("Tensor", "Scalar")}
EXACT |= {f"aten.{name}_.{end}": name for name in ("add", "sub", "mul") for end in ("Tensor", "Scalar")}
DIVISIONS = {"aten.div.Tensor", "aten.div.Scalar"}
SOURCES = {f"aten.{name}.default": "self" for name in ("_to_copy", "clone", "contiguous", "constant_pad_nd")}
"""The name of the argument that an operator copies, waits for, pads, sends or splits.

Calls may list arguments in any order.
"""
SOURCES |= {"aten.copy_.default": "src", "bitproof.offload.default": "x", "bitproof.reload.default": "host"}
SOURCES |= {"bitproof.wait_offload.default": "host", "bitproof.wait_reload.default": "x"}
SOURCES |= {f"_c10d_functional.{name}.default": "input" for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
SOURCES |= {"_c10d_functional.wait_tensor.default": "tensor", "aten.split_with_sizes_copy.default": "self"}
"""The argument that an operator copies, waits for, pads, sends or splits: certificates list arguments in any order."""
ORDERS = (["self"], ["self", "other"], ["condition", "self", "other"])
FILLS: dict[str, str | int] = {f"aten.{name}.default": "fill_value" for name in ("full", "full_like", "new_full")}
FILLS |= {f"aten.{name}.default": 0 for name in ("zero_", "zeros", "zeros_like", "new_zeros")}
FILLS |= {f"aten.{name}.default": 1 for name in ("ones", "ones_like", "new_ones")}
FILLS |= {"aten.scalar_tensor.default": "s", "aten.fill.Scalar": "value", "aten.fill_.Scalar": "value"}
UNWRITTEN = ("empty", "new_empty", "_empty", "_make_dep_token", "inductor_rand_eager_offset")
SPLIT = "aten.split_with_sizes_copy.default"
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
CARRIERS = {f"aten.{x}.default" for x in ("embedding", "flip", "gather", "index_select")}
CARRIERS |= {f"aten.{x}.default" for x in ("repeat", "roll", "tril", "triu")} | {"aten.index.Tensor"}
UPDATES = ("aten._fused_adam.default", "aten._fused_adamw.default")
NEXT = object()
"""Result of a line of the page that does not apply to a call; the next line is tried."""

TORCHS = ("aten.", "prims.", "bitproof.", f"{C10D}.")
"""Namespaces whose operators all have a signature. Operators of other namespaces, such as a user's, have none."""
WORDS_TAKE = {
    "input": "",
    "constant": "digest",
    "getitem": "0 1",
    "view": "self others?",
    "number": "0",
    "python.float": "self",
}
"""Arguments of calls that are not operators: `getitem` takes item `1` of `0`, and `view` shows parts of `self`."""


def fits(op: str, names: Iterable[str]) -> bool:
    """Return whether an operator accepts exactly these argument names: `aten.sum.dim_IntList` needs `self` and `dim`.

    An operator without a signature, such as a user's, accepts any arguments.
    """
    if op not in TAKES and op.startswith("python."):
        return [*names] in (["0"], ["0", "1"])
    if op not in TAKES:
        # The calls of a refused operator are refused anyway.
        return not op.startswith(TORCHS) or op.startswith(REFUSED)
    needed, known = TAKES[op]
    return needed <= {*names} <= known


def nodes(argument: Json) -> list[int]:
    """Return the indices of the calls to which an argument refers."""
    if type(argument) is not list or not argument:
        return []
    if argument[0] == "node":
        hold(len(argument) == 2, f"{argument} is no call")
        return [argument[1]]
    return [n for item in argument[1:] for n in nodes(item)] if argument[0] == "list" else []


def tensors(value: Json) -> list[Json]:
    """Return the tensors in a call's value, each as [dtype, device, shape, strides, offset, storage]."""
    several = value["several"] if type(value) is dict and "several" in value else [value]
    return [x["tensor"] for x in several if type(x) is dict and "tensor" in x]


def is_tensor(value: Json) -> bool:
    return type(value) is dict and "tensor" in value


def is_closed(sizes: Iterable[Json]) -> bool:
    """Return whether all sizes are numbers, so that no size depends on data."""
    return {*map(type, sizes)} <= {int}


def has_closed_layout(x: Json) -> bool:
    """Return whether a tensor's sizes, strides and offset are all numbers, so that none depends on data."""
    return is_closed((*x[2], *x[3], x[4]))


def opened(shape: Json) -> Json:
    """Replace each size of a shape that depends on data by None."""
    return [n if type(n) is int else None for n in shape]


def walk(state: State, graph: Json, side: str) -> State:
    """Derive the terms of all calls of a graph, in order. Return the state after the last call."""
    g = new_walk(state, graph, side)
    for _ in g["calls"]:
        take_call(g)
    return g


def new_walk(state: State, graph: Json, side: str) -> State:
    """Return the initial state of a walk through a graph's calls. A call's term describes its value in the proof.

    - `s`, `side`, `calls`: the proof's state, the name of the graph's system, and the graph's calls.
    - `values`: the term of each call so far: a list for several results, None for a refused call.
    - `stale`: calls whose value was overwritten.
    - `lying`: storage -> calls with a result in it.
    - `inputs`: name of an input or constant -> (index of its call, its term).
    - `symbols`: symbol of a data-dependent size -> term.
    - `generator`: term of the random generator's state.
    - `filling`, `reading`: storage -> launched copies and collectives that write or read it, until they are waited for.
    - `last_use`: storage -> last call that reads it.
    """
    calls = [
        {"name": name, "op": op, "args": dict(args), "own": own, "writes": writes, "random": random}
        | {"reads": [n for _, value in args for n in nodes(value)], "results": tensors(own)}
        for name, op, args, own, writes, random, _ in graph["calls"]
    ]
    g: State = {"s": state, "side": side, "calls": calls, "values": [], "stale": set(), "lying": {}, "inputs": {}}
    symbols_and_memory = {"symbols": {}, "generator": ["seed"], "filling": {}, "reading": {}}
    return g | symbols_and_memory | {"last_use": _last_uses(graph, calls)}


def take_call(g: State) -> None:
    """Derive the term of the next call, and record the memory that it writes.

    The term is None if the call is refused.
    """
    place, value = len(g["values"]), None
    call = g["calls"][place]
    try:
        value = _value(g, place, call)
    except UnknownError:
        if call["random"]:
            g["generator"] = ["fresh", g["side"], place, "generator", []]
    # A refused call without a result was made for some effect, whatever it states: it may have written its arguments.
    if call["writes"] or (value is None and (call["own"] is None or call["op"].startswith("higher_order."))):
        _overwrite(g, call, value)
    _check_value(g["s"], call, value)
    g["values"].append(value)
    for x in call["results"]:
        g["lying"].setdefault(x[5], []).append(place)


def _check_value(state: State, call: State, value: Json) -> None:
    """Raise RejectedError unless a call's term has the dtype and shape that the graph states for its result.

    `value` is the term's index, a list of indices for several results, or None for a refused call.
    """
    if value is None:
        return
    own = call["own"]
    several = own["several"] if call["results"] and not is_tensor(own) else [own]
    found = value if type(value) is list else [value]
    hold(len(several) == len(found), f"{call['name']} has {len(found)} values")
    for x, t in zip(several, found, strict=True):
        expected = [x["tensor"][0], opened(x["tensor"][2])] if is_tensor(x) else NUMBER
        if t is not None and state["types"][t] != expected:
            raise RejectedError(f"{call['name']} gives {expected}, which its term is not")


def _last_uses(graph: Json, calls: list[State]) -> dict[int, float]:
    """Return storage -> index of the last call that reads it; infinity for inputs, constants and outputs."""
    found: dict[int, float] = {}
    for place, call in enumerate(calls):
        for read in call["reads"]:
            # When the walk reaches this call, `known` rejects any other index.
            if type(read) is int and 0 <= read < place:
                found |= {x[5]: place for x in calls[read]["results"]}
    kept = [call for call in calls if call["op"] in ("input", "constant")]
    kept += [calls[n] for _, n in graph["outputs"] if n < len(calls)]
    return found | {x[5]: inf for call in kept for x in call["results"]}


def known(g: State, n: int) -> Json:
    """Return the term of an earlier call; None if the call is refused or its value was overwritten."""
    hold(_is_count(n) and n < len(g["values"]), f"call {n} is read before it runs")
    return None if n in g["stale"] else g["values"][n]


def _value(g: State, place: int, call: State) -> Json:
    """Return the term of the call with index `place`: the first result of the functions in LINES that is not NEXT.

    Raises UnknownError if the call is refused (line 1 of docs/reference/certificate.md).
    """
    op, name = call["op"], call["op"].rpartition(".")[0]
    call["found"] = [known(g, n) for n in call["reads"]]
    call["given"] = [g["calls"][n]["own"] for n in call["reads"]]
    group = call["args"].get("group_name", ["ranks"])
    is_refused = op not in UNDERSTOOD and op.startswith(REFUSED)
    if None in call["found"] or is_refused or group[0] != "ranks" or "non_blocking" in call["args"]:
        raise UnknownError
    # A launch may not have filled its result yet, so nothing may read it before the wait. Waits, views, fills and
    # uninitialized allocations read no element.
    storages = {x[5] for value in call["given"] for x in tensors(value)}
    shows = not call["writes"] and storages and {x[5] for x in call["results"]} == storages
    is_new = op in FILLS or is_unwritten(op)
    reads_none = name in WAITS or name == "ao.wait_tensor" or is_new or shows
    if not reads_none and any(g["filling"].get(storage) for storage in storages):
        raise UnknownError
    if call["writes"]:
        _check_write(g, call)
    # A wait or a launch has its effect even if the lines below give the call no term.
    if op.endswith(".default") and name in WAITS:
        hold(call["reads"], f"{call['name']} waits for nothing")
        _wait(g, place, WAITS[name], {x[5] for x in tensors(call["given"][_source(call)])})
    elif name in LAUNCHES:
        _launch(g, place, LAUNCHES[name], name == "bitproof.offload", call, storages)
    for line in LINES:
        value = line(g, place, call)
        if value is not NEXT:
            return value
    raise AssertionError("the last line applies to all")


def _source(call: State) -> int:
    """Return the index in `call["reads"]` of the tensor that the call copies, waits for, pads, sends or splits.

    SOURCES has the argument's name. An operator that is not in SOURCES must read a single call.
    """
    if call["op"] not in SOURCES:
        if len(call["reads"]) != 1:
            raise UnknownError
        return 0
    argument = call["args"].get(SOURCES[call["op"]])
    if type(argument) is not list or argument[0] != "node":
        raise UnknownError
    return int(call["reads"].index(argument[1]))


def _input(g: State, place: int, call: State) -> Json:
    """Return the term of an input or constant; NEXT for any other call.

    Implements line 2 of docs/reference/certificate.md.

    An input's term has the name of the call, and a constant's term its digest.
    """
    op, args, own = call["op"], call["args"], call["own"]
    if op == "input" and not args:
        name = call["name"]
    elif op == "constant" and [*args] == ["digest"] and args["digest"][0] == "str":
        name = args["digest"][1]
    else:
        return NEXT
    hold(call["name"] not in g["inputs"] and is_tensor(own), f"{call['name']} is no input, or two")
    # Inputs share no memory with earlier calls; constants may share it with each other, as nothing writes them.
    before = [g["calls"][n]["op"] for n in g["lying"].get(own["tensor"][5], ())]
    hold(all(x == op == "constant" for x in before), f"{call['name']} lies where another call does")
    found = find(g["s"], op, name, own["tensor"][0], own["tensor"][2])
    g["inputs"][call["name"]] = place, found
    return found


def _getitem(g: State, place: int, call: State) -> Json:
    """Return the term of one result of a call with several, or of a number read from a tensor; NEXT for any other call.

    Implements line 3 of docs/reference/certificate.md.
    """
    args = call["args"]
    if call["op"] == "getitem" and [*args] == ["0", "1"]:
        if type(call["found"][0]) is not list:
            raise UnknownError
        hold(_is_count(args["1"]), "no place")
        hold(call["own"] == call["given"][0]["several"][args["1"]], f"{call['name']} is not what it takes")
        return call["found"][0][args["1"]]
    if call["op"] == "aten._local_scalar_dense.default" and [*args] == ["self"]:
        item = ["item", call["found"][0]]
        _define_symbols(g, [call["own"]], lambda _: item)
        return find(g["s"], *item)
    return NEXT


def _copy(g: State, place: int, call: State) -> Json:
    """Return the source's term, for a wait or a copy with the same dtype and shape; NEXT for any other call.

    Implements line 4 of docs/reference/certificate.md.
    """
    own = call["own"]
    if call["op"] in COPIES:
        n = _source(call)
        source, own = call["given"][n]["tensor"], own["tensor"]
        if [own[0], own[2]] == [source[0], source[2]]:
            return call["found"][n]
    elif call["op"].endswith(".default") and call["op"].rpartition(".")[0] in WAITS:
        n = _source(call)
        if own == call["given"][n]:
            return call["found"][n]
    return NEXT


def _exact(g: State, place: int, call: State) -> Json:
    """Return the term of an exact operator, with each operand broadcast to the result's shape.

    Return NEXT, so that the next rule is tried, for any other call, or if the dtype cannot represent a number among the
    operands. Implements line 5 of docs/reference/certificate.md, which lists the exact operators.
    """
    op, args, state, given = call["op"], call["args"], g["s"], call["given"]
    if op == "aten.pow.Tensor_Scalar":
        dtype = call["own"]["tensor"][0]
        if dtype not in REAL or _number(args["exponent"], dtype) != 2:
            return NEXT
        # x ** 2 is x * x.
        op, args, given = "aten.mul.Tensor", {"self": args["self"], "other": args["self"]}, given * 2
    if (op not in EXACT and op not in DIVISIONS) or [*args] not in ORDERS or not given:
        return NEXT
    own, read, name = call["own"]["tensor"], [x["tensor"] for x in given], EXACT.get(op, "mul")
    dtypes, shape = [x[0] for x in read], own[2]
    count = 3 if name == "where" else 2 if name in TWO else 1
    # The second operand may be a number, which counts in the tensor's dtype.
    dtypes_of_all = dtypes * 2 if len(dtypes) < count == 2 else dtypes
    if len(args) != count or not takes(name, own[0], dtypes_of_all) or any(x[1] != own[1] for x in read):
        return NEXT
    # Only sizes that are numbers can be broadcast: whether an open size is 1 is unknown.
    if not all(x[2] == shape or is_closed((*x[2], *shape)) for x in read):
        return NEXT
    if any(x[2] != shape for x in read):
        hold(_common([x[2] for x in read]) == shape, f"{call['name']} gives another shape")
    operands: list[int] = []
    # Only a division by a number may become a product.
    if op in DIVISIONS and nodes(args["other"]):
        return NEXT
    for value in args.values():
        if type(value) is list and value[0] == "node":
            t, of = g["values"][value[1]], g["calls"][value[1]]["own"]["tensor"][2]
            operands.append(t if of == shape else view(state, t, repeated(of, shape)))
            continue
        # Beside integers, only an integer is covered: a real number would make the result real.
        number = _number(value, dtypes[0]) if type(value) is int or dtypes[0] in REAL else None
        if op in DIVISIONS and number is not None:
            # Dividing by a power of 2 is multiplying by its inverse.
            number = 1 / number if abs(frexp(number)[0]) == 0.5 and has(dtypes[0], 1 / number) else None
        if number is None or not is_closed(shape):
            return NEXT
        operands.append(filled(state, shape, dtypes[0], number))
    return find(state, "exact", name, own[0], own[1], operands)


def _common(shapes: list[list[int]]) -> list[int]:
    """Return the shape to which these shapes are broadcast together: [2, 3] for [3] and [2, 1]."""
    rank = max(map(len, shapes))
    sizes = zip(*([1] * (rank - len(shape)) + shape for shape in shapes), strict=True)
    return [next((n for n in dim if n != 1), 1) for dim in sizes]


def _number(argument: Json, dtype: str) -> float | None:
    """Return an argument's value as a float; True is 1, False is 0.

    None if the argument is not a number, if the dtype cannot represent it, or if it is an integer beyond 2^53.
    """
    if type(argument) is int:
        value = float(argument) if abs(argument) <= 2**53 else inf
    elif argument in (["bool", "True"], ["bool", "False"]):
        value = float(argument[1] == "True")
    elif type(argument) is list and argument[0] == "float" and len(argument) == 2:
        value = float.fromhex(argument[1])
        # torch also rounds before it computes with a float32 tensor.
        value = rounded(value, "float32") if dtype == "float32" and isfinite(value) else value
    else:
        return None
    return value if has(dtype, value) else None


def _fill(g: State, place: int, call: State) -> Json:
    """Return the term of a call that fills a tensor with a number; NEXT for any other call.

    Also NEXT if the dtype cannot represent the number, or if a size depends on data. Implements line 6 of
    docs/reference/certificate.md.
    """
    if call["op"] not in FILLS:
        return NEXT
    which, own = FILLS[call["op"]], call["own"]["tensor"]
    number = _number(call["args"][which] if type(which) is str else which, own[0])
    if number is None or not is_closed(own[2]):
        return NEXT
    return filled(g["s"], own[2], own[0], number)


def _pad(g: State, place: int, call: State) -> Json:
    """Return the term of a padded tensor, which is a cat with filled ends; NEXT for any other call.

    Also NEXT if a padding is negative, if a size depends on data, or if the dtype cannot represent the filling number.
    Implements line 7 of docs/reference/certificate.md.
    """
    if call["op"] != "aten.constant_pad_nd.default":
        return NEXT
    n = _source(call)
    dtype, _, shape = call["given"][n]["tensor"][:3]
    pads, number, t = call["args"]["pad"][1:], _number(call["args"].get("value", 0), dtype), call["found"][n]
    if not is_closed((*shape, *pads)) or min(pads, default=0) < 0 or number is None:
        return NEXT
    hold(len(pads) % 2 == 0, f"{call['name']} pads one side")
    # torch lists paddings in pairs, for the last dim first.
    for dim, before, behind in zip(range(len(shape) - 1, -1, -1), pads[::2], pads[1::2], strict=False):
        ends = [filled(g["s"], put(shape, dim, n), dtype, number) for n in (before, behind)]
        t, shape = find(g["s"], "cat", [ends[0], t, ends[1]], dim), put(shape, dim, before + shape[dim] + behind)
    return t


def _dim(call: State, rank: int) -> int:
    """Return the argument `dim` of a cat, stack or split, by default 0.

    Raises RejectedError if it is not below `rank`.
    """
    dim = call["args"].get("dim", 0)
    source = "self" if call["op"] == SPLIT else "tensors"
    hold(_is_count(dim) and dim < rank and {*call["args"]} <= {source, "dim"}, "no dim, or more arguments")
    return int(dim)


def _whole(state: State, t: int, shape: list[int]) -> int:
    """Return the term for term `t` reshaped to `shape`, with its elements in the same order."""
    hold(prod(shape) == prod(shape_of(state, t)), f"not as many elements as {shape}")
    return view(state, t, full(shape))


def _join(g: State, place: int, call: State) -> Json:
    """Return the term of a cat or stack; NEXT for any other call.

    Also NEXT if the parts differ in dtype, or if a size depends on data. Implements line 8 of
    docs/reference/certificate.md.
    """
    if call["op"] not in ("aten.cat.default", "aten.stack.default"):
        return NEXT
    own, read = call["own"]["tensor"], [x["tensor"] for x in call["given"]]
    if any(x[0] != own[0] or not is_closed(x[2]) for x in read):
        return NEXT
    dim, parts = _dim(call, len(own[2])), call["found"]
    if call["op"] == "aten.stack.default":
        shapes = [[*x[2][:dim], 1, *x[2][dim:]] for x in read]
        parts = [_whole(g["s"], t, shape) for t, shape in zip(parts, shapes, strict=True)]
    elif len(own[2]) != 1:
        # torch ignores parts of shape [0] beside tensors with more dims.
        parts = [t for t, x in zip(parts, read, strict=True) if x[2] != [0]]
    return find(g["s"], "cat", parts, dim)


def _collect(g: State, place: int, call: State) -> Json:
    """Return the term of an all-gather or reduce-scatter; NEXT for any other call.

    A reduce-scatter's input is reshaped to [group size, n], and row r belongs to rank r. Raises UnknownError if a size
    depends on data. Implements line 9 of docs/reference/certificate.md.
    """
    if call["op"] not in (GATHER, REDUCE):
        return NEXT
    n = _source(call)
    state, t, args = g["s"], call["found"][n], call["args"]
    dtype, device, shape = call["given"][n]["tensor"][:3]
    groups, size = args["group_name"][1], args["group_size"]
    if not is_closed(shape) or size != len(groups[0]):
        raise UnknownError
    if call["op"] == REDUCE:
        hold(args["reduce_op"][0] == "str", "a reduction by no name")
        t = _whole(state, t, [size, prod(shape) // size])
        # The dtype and device belong to the operation: the same sum in bfloat16 rounds differently.
        t = find(state, "reduce", t, f"{args['reduce_op'][1]} in {dtype} on {device}", groups)
    else:
        t = find(state, "gather", t, groups)
    return _whole(state, t, call["own"]["tensor"][2])


def is_unwritten(op: str) -> bool:
    """Return whether an operator allocates uninitialized memory, whatever its namespace and overload."""
    return op.split(".")[-2:][0].startswith(UNWRITTEN)


def _uninitialized(g: State, place: int, call: State) -> Json:
    """Return a term for the uninitialized memory that a call creates; NEXT for any other call.

    The term contains the graph and the call, so it equals no other term, except that two tensors without elements may
    have equal terms. Implements line 10 of docs/reference/certificate.md.
    """
    if not is_unwritten(call["op"]):
        return NEXT
    own = call["own"]["tensor"]
    return _op(g, call, {}) if 0 in own[2] else find(g["s"], "fresh", g["side"], place, own[0], opened(own[2]))


def _view_or_split(g: State, place: int, call: State) -> Json:
    """Return the term or terms of a view, split or reshape; NEXT for any other call.

    The term has the layout of the view; if a size depends on data, it has the operator and its arguments instead.
    Raises UnknownError for a view as another dtype, and if the layout is not strided. Implements line 11 of
    docs/reference/certificate.md.
    """
    op, results = call["op"], call["results"]
    if not results or call["writes"] or not call["given"] or not is_tensor(call["given"][0]):
        return NEXT
    x, t, state = call["given"][0]["tensor"], call["found"][0], g["s"]
    is_open = not all(map(has_closed_layout, (x, *results)))
    is_in_place = all(y[5] == x[5] for y in results)
    if op not in ("view", SPLIT, *RESHAPES) and not (is_open and is_in_place):
        return NEXT
    hold(_source(call) == 0, f"{call['name']} reads another tensor before what it shows")
    if any(y[0] != x[0] for y in results) or (is_open and not op.startswith(("aten.", "bitproof."))):
        raise UnknownError
    if is_open and op in RESHAPES:
        return _results(g, call, "move", "reshape", {"self": call["args"]["self"], "shape": ["list", *results[0][2]]})
    if is_open:
        return _results(g, call, "move", op, call["args"])
    if is_in_place:
        # A window on memory, from the first element of x on, becomes one on the elements of x.
        lie = [normal(y[2], y[3], y[4] - x[4]) for y in results]
        windows = [translate(w, x[2], x[3], row_major(x[2])) for w in lie]
    elif op == SPLIT:
        dim = _dim(call, len(x[2]))
        windows = parts_of(full(x[2]), dim, [y[2][dim] for y in results]) or [None]
    else:
        hold(op in RESHAPES, f"{call['name']} shows nothing")
        return _whole(state, t, results[0][2])
    if None in windows:
        raise UnknownError
    shown = [t if w == full(x[2]) else view(state, t, w) for w in windows]
    return shown[0] if is_tensor(call["own"]) else shown


def _layout_independent(g: State, place: int, call: State) -> Json:
    """Return the term of an operator whose result depends only on values, not on layouts; NEXT for any other call.

    Implements line 12 of docs/reference/certificate.md.
    """
    read = [x for value in call["given"] for x in tensors(value)]
    is_update = call["op"] in UPDATES and len(read) == len(call["given"])
    # An update's kernel pairs elements by their positions in memory: layouts do not matter only if all are row-major.
    in_rows = all(has_closed_layout(x) and x[1] == "cpu" and normal(x[2], x[3], 0) == full(x[2]) for x in read)
    is_carrier = call["op"] in CARRIERS or (is_update and in_rows)
    return _results(g, call, "move", call["op"], call["args"]) if is_carrier else NEXT


def _other(g: State, place: int, call: State) -> Json:
    """Return the term of any other call. Equal operators on equal terms with equal layouts have equal results.

    Implements line 13 of docs/reference/certificate.md.
    """
    return _op(g, call, call["args"])


LINES = (
    _input,
    _getitem,
    _copy,
    _exact,
    _fill,
    _pad,
    _join,
    _collect,
    _uninitialized,
    _view_or_split,
    _layout_independent,
    _other,
)
"""Lines 2 to 13 of docs/reference/certificate.md, in order."""


def _op(g: State, call: State, args: dict[str, Json]) -> Json:
    """Return a call's term of kind op, or a list of `out` terms for several results.

    A random call also reads the state of the random generator, and its result determines the next state.
    """
    op, read = call["op"], [x[0] for value in call["given"] for x in tensors(value)]
    if call["random"]:
        args = {**args, "generator": ["value", find(g["s"], *g["generator"])]}
    # On such tensors an in-place operator has the bits of the plain operator: `add_` is compared as `add`.
    if op in EXACT and len(read) == len(args) and all(dtype in REAL or dtype in WHOLE for dtype in read):
        op = op.replace("_.", ".")
    found = _results(g, call, "op", op, args)
    if call["random"]:
        g["generator"] = ["draws", found[0] if type(found) is list else found]
    return found


def _results(g: State, call: State, kind: str, op: str, args: dict[str, Json]) -> Json:
    """Return a call's term of kind `kind` ("op" or "move"), or a list of `out` terms for several results.

    New symbols in the results' sizes are given terms, too.
    """
    own, results, state = call["own"], call["results"], g["s"]
    several = [own] if is_tensor(own) else own["several"] if type(own) is dict else [own]
    if not results or not all(x is None or is_tensor(x) for x in several):
        raise UnknownError
    arguments = [[name, term_of(g, value, kind == "op")] for name, value in args.items()]
    if op == EXCHANGE:
        _define_row_symbol(g, results[0][2][0], *args["output_split_sizes"][1:])
    tensors = [x and [x["tensor"][0], opened(x["tensor"][2])] for x in several]
    term = find(state, kind, op, arguments, *(tensors[0] if is_tensor(own) else (None, None)))
    _define_symbols(g, [n for x in results for n in x[2]], lambda at: ["extent", term, at])
    for x in results:
        # This raises UnknownError for a symbol without a term in the strides or the offset.
        _sizes_of(g, (*x[3], x[4]))
    return term if is_tensor(own) else [x and find(state, "out", term, k, *x) for k, x in enumerate(tensors)]


def term_of(g: State, value: Json, is_op: bool) -> Json:
    """Return a call's argument in the form that terms use. `is_op` is False for terms of kind move."""
    if type(value) is not list:
        return value
    if value[:1] == ["node"] and len(value) == 2:
        own, t = g["calls"][value[1]]["own"], g["values"][value[1]]
        hold(is_tensor(own), "an argument that is no tensor")
        if not is_op:
            return ["value", t]
        dtype, device, shape, strides, offset, _ = own["tensor"]
        # cuBLASLt gets the alignment of each address up to 256 bytes, and may choose another kernel by them.
        line = 256 if device.startswith("cuda") else 64
        lead = offset * BYTES.get(dtype, 1) % line if type(offset) is int else _size_of(g, offset)
        return ["tensor", t, dtype, device, _sizes_of(g, shape), _sizes_of(g, strides), lead]
    if value[:1] == ["list"]:
        return ["list", *(term_of(g, item, is_op) for item in value[1:])]
    return _size_of(g, value) if value[:1] == ["size"] else value


def _size_of(g: State, size: Json) -> Json:
    """Return a size in the form that terms use: each symbol is replaced by its term.

    Raises UnknownError for a symbol without a term.
    """
    if type(size) is int:
        return size
    hold(type(size) is list and size[:1] == ["size"], "no size")
    symbols = g["symbols"]
    if any(name not in symbols for product in size[1:] for name in product[1:]):
        raise UnknownError
    products = [[n, *sorted(symbols[name] for name in names)] for n, *names in size[1:]]
    return ["size", *sorted(products, key=lambda product: (product[1:], product[0]))]


def _sizes_of(g: State, sizes: Iterable[Json]) -> list[Json]:
    return [_size_of(g, size) for size in sizes]


def _define_symbols(g: State, sizes: list[Json], term: Callable[[int], Json]) -> None:
    """Give each new symbol among `sizes` a term: `term(i)` for a symbol that is the i-th size.

    Raises UnknownError for a new symbol that only occurs inside a size, as in `2 * u0`.
    """
    for at, size in enumerate(sizes):
        is_symbol = type(size) is list and len(size) == 2 and len(size[1]) == 2 and size[1][0] == 1
        if is_symbol and size[1][1] not in g["symbols"]:
            g["symbols"][size[1][1]] = find(g["s"], *term(at))
        # This raises UnknownError for a symbol that only occurs within a size.
        _size_of(g, size)


def _define_row_symbol(g: State, rows: Json, first: Json, *others: Json) -> None:
    """Give a term to the new symbol in `rows`, the number of rows that an all-to-all receives.

    `first` and `others` are the numbers of rows from each rank. If `rows` is `first` plus the symbol, the symbol is the
    sum of `others`.
    """
    if type(rows) is int:
        return
    # The products of the first split. With the new symbol, they must be all products of `rows`.
    own = [line_of(product) for product in (first[1:] if type(first) is list else [[first]] if first else [])]
    for product in rows[1:]:
        is_rest = {*map(line_of, rows[1:])} == {*own, line_of(product)}
        if len(product) == 2 and product[0] == 1 and product[1] not in g["symbols"] and is_rest:
            g["symbols"][product[1]] = find(g["s"], "rows", _sizes_of(g, others))


# -- Memory ------------------------------------------------------------------------------------------


def _check_write(g: State, call: State) -> None:
    """Raise UnknownError for an in-place write that the rules do not cover.

    For example, if the written tensor is a constant, overlaps itself, or is used by a collective in flight.
    """
    target = call["args"].get("self")
    if call["writes"] != ["self"] or not call["op"].split(".")[1].endswith("_") or target[:1] != ["node"]:
        raise UnknownError
    own = g["calls"][target[1]]["own"]
    hold(is_tensor(own), "a write to what is no tensor")
    storage = own["tensor"][5]
    others = [x for name, value in call["args"].items() if name != "self" for n in nodes(value) for x in _own(g, n)]
    # Through another layout of the same memory, elements may be read before or after they are written.
    is_torn = any(x[5] == storage and x != own["tensor"] for x in others)
    is_flying = g["filling"].get(storage) or g["reading"].get(storage)
    is_kept = any(g["calls"][n]["op"] == "constant" for n in g["lying"][storage])
    if own != call["own"] or is_torn or is_flying or is_kept or overlaps(own["tensor"]):
        raise UnknownError


def _own(g: State, n: int) -> list[Json]:
    return list(g["calls"][n]["results"])


def overlaps(x: Json) -> bool:
    """Return whether two indices of a tensor may refer to the same element.

    It is False only in two cases:

    - All sizes and strides are numbers, and in the order of the strides, each stride exceeds the distance that the
      previous dims span.
    - Only the first size depends on data, and the tensor is row-major.
    """
    shape, strides = x[2], x[3]
    if not is_closed((*shape, *strides)):
        return not is_closed((*shape[1:], *strides)) or strides != row_major([1, *shape[1:]])
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _overwrite(g: State, call: State, value: Json) -> None:
    """Record that a call writes memory. `value` is the term of the written elements; None if the call is refused.

    - Earlier calls whose value is exactly the written elements get this term.
    - All other values in that memory become stale: no later call may read them.
    - A refused call makes everything in the memory of its arguments stale.
    """
    written = call["results"] if value is not None else [x for n in call["reads"] for x in _own(g, n)]
    for x in written:
        flying = [*g["filling"].get(x[5], ()), *g["reading"].get(x[5], ())]
        for n in (*g["lying"].get(x[5], ()), *flying):
            if value is None or g["calls"][n]["own"] != {"tensor": x}:
                g["stale"].add(n)
            # A refused call has no value, and stays refused.
            elif g["values"][n] is not None:
                g["values"][n] = value


def _launch(g: State, place: int, kind: str, holds: bool, call: State, takes: set[int]) -> None:
    """Record the launch, at index `place`, of a collective or copy, which uses memory until its wait.

    - `kind`: the kind of the wait.
    - `takes`: the storages that it reads until the wait.
    - `holds`: whether the graph must keep these storages until the wait, as for an offload.
    """
    for x in call["results"]:
        g["filling"].setdefault(x[5], {})[place] = kind, takes, holds
    if call["results"]:
        for storage in takes:
            g["reading"].setdefault(storage, set()).add(place)


def _wait(g: State, place: int, kind: str, storages: set[int]) -> None:
    """Record a wait at index `place`: it ends the launches of this kind that write these storages.

    Raises UnknownError if memory that a launch must keep may be freed before the wait.
    """
    is_late = False
    for storage in storages:
        # A copy of the items, since the loop deletes some.
        for launch, (of, takes, holds) in [*g["filling"].get(storage, {}).items()]:
            if of == kind:
                del g["filling"][storage][launch]
                is_late |= holds and any(g["last_use"].get(x, place) < place for x in takes)
                for x in takes:
                    g["reading"].get(x, set()).discard(launch)
    if is_late:
        raise UnknownError


# -- Signatures --------------------------------------------------------------------------------------

SIGNATURES = """\
: _nnpack_available _use_cudnn_rnn_flatten_weight is_vulkan_available prims._make_token.default; A: _linalg_det
_linalg_slogdet linalg_det linalg_inv linalg_slogdet; A B left?: linalg_solve; A B left? check_errors?:
_linalg_solve_ex linalg_solve_ex; A UPLO? compute_v?: _linalg_eigh; A check_errors?: linalg_inv_ex; A driver?:
linalg_svdvals; A full_matrices: prims.svd.default; A full_matrices? compute_uv? driver?: _linalg_svd; A full_matrices?
driver?: linalg_svd; A mode?: linalg_qr; A offset? dim1? dim2?: linalg_diagonal; A pivot?: linalg_lu linalg_lu_factor;
A pivot? check_errors?: linalg_lu_factor_ex; LD pivots B hermitian?: linalg_ldl_solve; LU pivots B left? adjoint?:
linalg_lu_solve; a: prims.item.default prims.view_of.default; a b c: prims.fma.default; a dim outer_length:
prims.split_dim.default; a dims: prims.rev.default; a dtype: prims.convert_element_type.default
prims.view_of_dtype.default; a fill_value dtype device requires_grad: prims.full_like.default; a permutation:
prims.transpose.default; a shape: prims.reshape.default; a shape broadcast_dimensions: prims.broadcast_in_dim.default;
a size? stride? dtype? device? layout?: _assert_tensor_metadata; a start end: prims.collapse.default
prims.collapse_view.default; a stride: prims.copy_strided.default; abs angle: polar; anchor positive negative margin?
p? eps? swap? reduction?: triplet_margin_loss; condition: where; condition self other: where.Scalar where.ScalarOther
where.ScalarSelf where.self; count prob generator?: binomial; data batch_sizes batch_first padding_value total_length:
_pad_packed_sequence; dtype: prims.maximum_value.default prims.minimum_value.default; dtype? layout? device?
pin_memory? memory_format?: _make_dep_token; dual level: _unpack_dual; dummy a? b?: _test_ambiguous_defaults.a
_test_ambiguous_defaults.b _test_string_default; element test_elements assume_unique? invert?: isin.Scalar_Tensor;
elements test_element assume_unique? invert?: isin.Tensor_Scalar; elements test_elements assume_unique? invert?:
isin.Tensor_Tensor; end dtype? layout? device? pin_memory?: arange; equation tensors path?: einsum; filename shared?
size? dtype? layout? device? pin_memory?: from_file; flat tensors: unflatten_dense_tensors; from_ to: can_cast; grad
dim indices sizes keepdim: value_selecting_reduction_backward; grad indices offset2bag bag_size maximum_indices
num_weights scale_grad_by_freq mode per_sample_weights padding_idx?: _embedding_bag_dense_backward; grad input:
to_mkldnn_backward; grad input dim output: cumprod_backward; grad input indices dim: cummaxmin_backward; grad input
masked_grad?: to_dense_backward; grad input_size batch_sizes batch_first: _pack_padded_sequence_backward; grad mask:
fake_quantize_per_channel_affine_cachemask_backward fake_quantize_per_tensor_affine_cachemask_backward; grad self:
infinitely_differentiable_gelu_backward; grad self scale zero_point quant_min quant_max grad_factor?:
_fake_quantize_learnable_per_tensor_affine_backward; grad self_sizes dim index: index_select_backward; grad size
align_corners: affine_grid_generator_backward; grad sizes: trace_backward; grad_in input_sizes dim size step:
unfold_backward; grad_out input mean rstd weight N C HxW group output_mask: native_group_norm_backward; grad_out input
normalized_shape mean rstd weight bias output_mask: native_layer_norm_backward; grad_out input normalized_shape rstd
weight output_mask: _fused_rms_norm_backward; grad_out input weight running_mean running_var save_mean save_invstd
train eps output_mask: native_batch_norm_backward; grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q
max_k dropout_p is_causal philox_seed philox_offset scale?: _scaled_dot_product_flash_attention_backward; grad_out
query key value out logsumexp dropout_p is_causal attn_mask? scale?:
_scaled_dot_product_flash_attention_for_cpu_backward; grad_out query key value out logsumexp philox_seed philox_offset
attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale?: _scaled_dot_product_cudnn_attention_backward;
grad_out self lambd: hardshrink_backward; grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset
dropout_p grad_input_mask is_causal? scale?: _scaled_dot_product_efficient_attention_backward; grad_output alpha scale
input_scale is_result self_or_result: elu_backward; grad_output indices num_weights padding_idx scale_grad_by_freq:
embedding_dense_backward; grad_output input weight bias_sizes stride padding dilation transposed output_padding groups
output_mask: convolution_backward; grad_output input_sizes dim index: select_backward; grad_output input_sizes dim
start end step: slice_backward; grad_output input_sizes offset dim1 dim2: diagonal_backward; grad_output mask scale:
native_dropout_backward; grad_output mask sizes: masked_scatter_backward; grad_output output: sigmoid_backward
tanh_backward; grad_output output dim input_dtype: _log_softmax_backward_data _softmax_backward_data; grad_output
output_size input_size align_corners scales?: upsample_linear1d_backward; grad_output output_size input_size
align_corners scales_d? scales_h? scales_w?: upsample_trilinear3d_backward; grad_output output_size input_size
align_corners scales_h? scales_w?: _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa_backward
upsample_bicubic2d_backward upsample_bilinear2d_backward; grad_output output_size input_size scales?:
_upsample_nearest_exact1d_backward upsample_nearest1d_backward; grad_output output_size input_size scales_d? scales_h?
scales_w?: _upsample_nearest_exact3d_backward upsample_nearest3d_backward; grad_output output_size input_size scales_h?
scales_w?: upsample_nearest2d_backward; grad_output self: _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
hardsigmoid_backward hardswish_backward mish_backward silu_backward; grad_output self approximate?: gelu_backward;
grad_output self beta threshold: softplus_backward; grad_output self buffer: log_sigmoid_backward; grad_output self
dim: glu_backward; grad_output self eps?: logit_backward; grad_output self kernel_size output_size indices:
fractional_max_pool2d_backward fractional_max_pool3d_backward; grad_output self kernel_size stride padding ceil_mode
count_include_pad divisor_override: avg_pool2d_backward avg_pool3d_backward; grad_output self kernel_size stride
padding dilation ceil_mode indices: max_pool2d_with_indices_backward; grad_output self lambd: softshrink_backward;
grad_output self min_val max_val: hardtanh_backward; grad_output self negative_slope self_is_result:
leaky_relu_backward; grad_output self noise lower upper training self_is_result: rrelu_with_noise_backward; grad_output
self padding: reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward
replication_pad2d_backward; grad_output self target p margin weight? reduction?: multi_margin_loss_backward;
grad_output self target reduction: mse_loss_backward soft_margin_loss_backward; grad_output self target reduction beta:
smooth_l1_loss_backward; grad_output self target reduction delta: huber_loss_backward; grad_output self target
reduction is_target: multilabel_margin_loss_backward; grad_output self target weight reduction ignore_index
total_weight: nll_loss2d_backward nll_loss_backward; grad_output self target weight? reduction?:
binary_cross_entropy_backward; grad_output self threshold: threshold_backward; grad_output self weight:
_prelu_kernel_backward; grad_output self weight kernel_size stride padding output_mask:
_slow_conv2d_backward.output_mask; grad_w saved_v saved_g saved_norms dim: _weight_norm_differentiable_backward; high
size dtype? layout? device? pin_memory?: randint; high size generator dtype? layout? device? pin_memory?:
randint.generator; host device?: bitproof.reload.default; host x: bitproof.wait_offload.default; i1 i2 i3 expand1
expand2 expand3 sumdim unroll_dim?: _trilinear; indices values size is_coalesced? check_pinning?:
_validate_sparse_coo_tensor_args; info api_name is_matrix: _linalg_check_errors; inp dims correction? output_dtype?:
prims.var.default; inp dims output_dtype?: prims.amax.default prims.amin.default; input: fbgemm_linear_quantize_weight;
input atol? rtol? hermitian?: linalg_matrix_rank.atol_rtol_tensor; input grid interpolation_mode padding_mode
align_corners: grid_sampler; input group_size group_name: _c10d_functional.all_gather_into_tensor.default; input hx
w_ih w_hh b_ih? b_hh?: rnn_relu_cell rnn_tanh_cell; input normalized_shape weight bias eps: native_layer_norm; input
normalized_shape weight eps: _fused_rms_norm; input normalized_shape weight? bias? eps? cudnn_enable?: layer_norm;
input normalized_shape weight? eps?: rms_norm; input num_groups weight? bias? eps? cudnn_enabled?: group_norm; input
output_size align_corners scale_factors: _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec
_upsample_lanczos2d_aa.vec upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec; input output_size
scale_factors: _upsample_nearest_exact2d.vec upsample_nearest1d.vec; input output_split_sizes input_split_sizes
group_name: _c10d_functional.all_to_all_single.default; input p train: native_dropout; input reduce_op group_name:
_c10d_functional.all_reduce.default; input reduce_op group_size group_name:
_c10d_functional.reduce_scatter_tensor.default; input target log_input full eps reduction: poisson_nll_loss; input tau:
linalg_householder_product; input tol hermitian?: linalg_matrix_rank.tol_tensor; input weight bias N C HxW group eps:
native_group_norm; input weight bias running_mean running_var training momentum eps: _native_batch_norm_legit
_native_batch_norm_legit_functional native_batch_norm; input weight bias stride padding dilation transposed
output_padding groups: convolution; input weight bias?: linear; input weight bias? stride? padding? dilation? groups?:
conv1d.padding conv2d conv2d.padding conv3d conv3d.padding; input weight bias? stride? padding? output_padding? groups?
dilation?: conv_transpose1d conv_transpose2d.input conv_transpose3d.input; input1 input2 target margin? reduction?:
cosine_embedding_loss margin_ranking_loss; input1 input2 weight bias?: bilinear; length start step dtype device
requires_grad: prims.iota.default; like dim: _dim_arange; low high size dtype? layout? device? pin_memory?:
randint.low; low high size generator dtype? layout? device? pin_memory?: randint.low_generator; low high size seed:
prims.inductor_randint.default; matrices: chain_matmul; mean std generator?: normal.Tensor_Tensor normal.float_Tensor;
mean std size generator? dtype? layout? device? pin_memory?: normal.float_float; mean std? generator?:
normal.Tensor_float; n d? dtype? layout? device? pin_memory?: fft_fftfreq fft_rfftfreq; n dtype? layout? device?
pin_memory?: eye randperm; n generator dtype? layout? device? pin_memory?: randperm.generator; n m dtype? layout?
device? pin_memory?: eye.m; n self: polygamma special_polygamma; pred a b: prims.where.default; query key value
attn_bias compute_log_sumexp dropout_p? is_causal? return_debug_mask? scale?: _scaled_dot_product_cudnn_attention;
query key value attn_bias compute_log_sumexp dropout_p? is_causal? scale?: _scaled_dot_product_efficient_attention;
query key value attn_mask? dropout_p? is_causal? dropout_mask? scale? enable_gqa?: _scaled_dot_product_attention_math;
query key value attn_mask? dropout_p? is_causal? scale? enable_gqa?: _fused_sdp_choice scaled_dot_product_attention;
query key value dropout_p? is_causal? attn_mask? scale?: _scaled_dot_product_flash_attention_for_cpu; query key value
dropout_p? is_causal? return_debug_mask? scale?: _scaled_dot_product_flash_attention; real imag: complex; repeats
output_size?: repeat_interleave.Tensor; row col offset? dtype? layout? device? pin_memory?: tril_indices triu_indices;
s: _print; s dtype? device?: prims.scalar_tensor.default; s dtype? layout? device? pin_memory?: scalar_tensor; scalar
tensor: result_type.Scalar_Tensor; scalar1 scalar2: result_type.Scalar_Scalar; self: _aminmax _assert_async _conj
_conj_copy _conj_physical _debug_has_internal_overlap _foreach_abs _foreach_abs_ _foreach_acos _foreach_acos_
_foreach_asin _foreach_asin_ _foreach_atan _foreach_atan_ _foreach_ceil _foreach_ceil_ _foreach_cos _foreach_cos_
_foreach_cosh _foreach_cosh_ _foreach_erf _foreach_erf_ _foreach_erfc _foreach_erfc_ _foreach_exp _foreach_exp_
_foreach_expm1 _foreach_expm1_ _foreach_floor _foreach_floor_ _foreach_frac _foreach_frac_ _foreach_lgamma
_foreach_lgamma_ _foreach_log _foreach_log10 _foreach_log10_ _foreach_log1p _foreach_log1p_ _foreach_log2
_foreach_log2_ _foreach_log_ _foreach_max _foreach_neg _foreach_neg_ _foreach_reciprocal _foreach_reciprocal_
_foreach_round _foreach_round_ _foreach_rsqrt _foreach_rsqrt_ _foreach_sigmoid _foreach_sigmoid_ _foreach_sign
_foreach_sign_ _foreach_sin _foreach_sin_ _foreach_sinh _foreach_sinh_ _foreach_sqrt _foreach_sqrt_ _foreach_tan
_foreach_tan_ _foreach_tanh _foreach_tanh_ _foreach_trunc _foreach_trunc_ _foreach_zero _foreach_zero_ _is_all_true
_is_any_true _is_zerotensor _linalg_eigvals _local_scalar_dense _neg_view_copy _shape_as_tensor
_test_autograd_multiple_dispatch.fullcoverage _test_autograd_multiple_dispatch_view
_test_autograd_multiple_dispatch_view_copy _test_check_tensor _test_warn_in_autograd _version abs abs_ absolute
absolute_ acos acos_ acosh acosh_ adjoint alias alias_copy all angle any arccos arccos_ arccosh arccosh_ arcsin arcsin_
arcsinh arcsinh_ arctan arctan_ arctanh arctanh_ argwhere asin asin_ asinh asinh_ atan atan_ atanh atanh_ atleast_1d
atleast_2d atleast_3d bitwise_not bitwise_not_ ceil ceil_ conj conj_physical conj_physical_ corrcoef cos cos_ cosh
cosh_ cudnn_is_acceptable data deg2rad deg2rad_ dense_dim dequantize.self det detach detach_ detach_copy digamma
digamma_ dim erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expm1 expm1_ fix fix_ fliplr flipud floor floor_
frac frac_ frexp.Tensor geqrf get_device hardsigmoid hardsigmoid_ hardswish hardswish_ i0 i0_ inverse is_complex
is_conj is_contiguous is_distributed is_floating_point is_inference is_leaf is_neg is_nonzero is_signed isfinite isinf
isnan isneginf isposinf isreal item lgamma lgamma_ lift_fresh lift_fresh_copy linalg_eig linalg_eigvals
linalg_matrix_exp log log10 log10_ log1p log1p_ log2 log2_ log_ log_sigmoid log_sigmoid_forward logdet logical_not
logical_not_ mH mT matrix_H matrix_exp max median min mish mish_ msort nanmedian neg neg_ negative negative_ nonzero
nonzero_numpy numel numpy_T output_nr positive rad2deg rad2deg_ ravel real reciprocal reciprocal_ relu relu6 relu6_
relu_ resolve_conj resolve_neg retains_grad round round_ rsqrt rsqrt_ selu selu_ set sgn sgn_ sigmoid sigmoid_ sign
sign_ signbit silu silu_ sin sin_ sinc sinc_ sinh sinh_ slogdet sparse_dim special_bessel_j0 special_bessel_j1
special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_ndtr special_ndtri special_psi special_sinc sqrt sqrt_ square square_ squeeze
squeeze_copy storage_offset sym_numel sym_storage_offset t t_copy tan tan_ tanh tanh_ trace trunc trunc_
view_as_complex view_as_complex_copy view_as_real view_as_real_copy zero zero_ prims.abs.default
prims.bitwise_not.default prims.ceil.default prims.conj_physical.default prims.floor.default prims.frexp.default
prims.isfinite.default prims.neg.default prims.round.default prims.sign.default prims.trunc.default; self A upper?
transpose? unitriangular?: triangular_solve; self B upper left? unitriangular?: linalg_solve_triangular; self LU_data
LU_pivots: lu_solve; self UPLO?: linalg_eigh linalg_eigvalsh; self alpha?: celu celu_; self alpha? scale? input_scale?:
elu elu_; self approximate?: gelu gelu_; self arg1? arg2? arg3?: _foobar; self assert_msg: _assert_async.msg
_assert_scalar; self assert_msg dep_token: _functional_assert_async.msg _functional_assert_scalar; self atol? rtol?
hermitian?: linalg_matrix_rank.atol_rtol_float linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor; self axis0
axis1: swapaxes; self b: _test_autograd_multiple_dispatch.ntonly; self batch1 batch2 beta? alpha?: addbmm baddbmm
baddbmm_; self beta? threshold?: softplus; self bins range? weight? density?: _histogramdd_bin_edges
_histogramdd_from_bin_cts histogramdd.TensorList_bins histogramdd histogramdd.int_bins; self bins weight? density?:
_histogramdd_from_bin_tensors histogram.bins_tensor; self bins? min? max?: histc; self bins? range? weight? density?:
histogram.bin_ct; self boundaries out_int32? right?: bucketize.Scalar bucketize.Tensor; self chunks dim?: chunk
unsafe_chunk; self cuda_enabled cpu_enabled: _autocast_to_full_precision; self cuda_enabled cpu_enabled cuda_dtype
cpu_dtype: _autocast_to_reduced_precision; self decimals: round.decimals round_.decimals; self decimals?:
special_round; self device dtype non_blocking? copy? memory_format?: to.device; self device?: is_pinned; self
diagonal?: diag tril tril_ triu triu_; self dim: _logcumsumexp count_nonzero.dim_IntList cummax cummin logcumsumexp
size.int squeeze.dim squeeze.dims squeeze_.dims squeeze_copy.dim squeeze_copy.dims stride.int sym_size.int
sym_stride.int unsqueeze unsqueeze_copy; self dim dtype?: _safe_softmax cumprod cumprod_ cumsum cumsum_ log_softmax.int
softmax.int special_log_softmax special_softmax; self dim edge_order?: gradient.array; self dim half_to_float:
_log_softmax _softmax; self dim index: index_select select.int select_copy.int; self dim index source: index_copy
index_copy_; self dim index source alpha?: index_add index_add_; self dim index source reduce include_self?:
index_reduce index_reduce_; self dim index sparse_grad?: gather; self dim index src: scatter.src scatter_.src
scatter_add scatter_add_; self dim index src reduce: scatter.reduce scatter_.reduce; self dim index src reduce
include_self?: scatter_reduce.two scatter_reduce_.two; self dim index value: index_fill.int_Scalar
index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor scatter.value scatter_.value; self dim keepdim?:
_aminmax.dim all.dim any.dim frobenius_norm.dim logsumexp max.dim median.dim min.dim nanmedian.dim nuclear_norm.dim
special_logsumexp; self dim keepdim? dtype?: mean.dim prod.dim_int sum.dim_IntList; self dim normalization forward:
_fft_c2c; self dim normalization last_dim_size: _fft_c2r; self dim normalization onesided: _fft_r2c; self dim
return_inverse? return_counts?: unique_dim_consecutive; self dim sizes: unflatten.int; self dim sorted? return_inverse?
return_counts?: unique_dim; self dim start length: narrow.Tensor narrow narrow_copy; self dim unbiased? keepdim?:
std.dim std_mean.dim var.dim var_mean.dim; self dim0 dim1: swapdims transpose.int transpose_copy.int; self dim?:
count_nonzero fft_fftshift fft_ifftshift glu unbind.int unbind_copy.int; self dim? correction? keepdim?: std.correction
std_mean.correction var.correction var_mean.correction; self dim? descending?: argsort sort; self dim? keepdim?:
all.dims amax amin aminmax any.dims argmax argmin mode; self dim? keepdim? dtype?: nanmean nansum; self dim? keepdim?
mode?: hash_tensor; self dim? start? end? step?: slice.Tensor slice_copy.Tensor; self dimension size step: unfold
unfold_copy; self dims: flip permute permute_copy tile; self downscale_factor: pixel_unshuffle; self dtype: view.dtype
view_copy.dtype; self dtype non_blocking? copy? memory_format?: to.dtype; self dtype?: mean prod sum; self dtype?
layout? device? pin_memory? memory_format?: empty_like rand_like randn_like; self dtype? layout? device? pin_memory?
non_blocking? copy? memory_format?: to.dtype_layout; self dtype? layout? device? pin_memory? non_blocking?
memory_format?: _to_copy; self dtype? masked_grad?: to_dense; self end weight: lerp.Scalar lerp.Tensor lerp_.Scalar
lerp_.Tensor; self eps?: logit logit_ special_logit; self exponent: _foreach_pow.List _foreach_pow.Scalar
_foreach_pow.ScalarAndTensor _foreach_pow.ScalarList _foreach_pow_.List _foreach_pow_.Scalar _foreach_pow_.ScalarList
float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
pow_.Scalar pow_.Tensor; self fill_value wrap?: fill_diagonal_; self found_inf inv_scale:
_amp_foreach_non_finite_check_and_unscale; self from: _has_compatible_shallow_copy_type; self from to generator?:
random.from random_.from; self from? to? generator?: uniform uniform_; self generator dtype? layout? device?
pin_memory? memory_format?: randn_like.generator; self generator?: _sample_dirichlet _standard_gamma bernoulli poisson
random random_; self grad: matrix_exp_backward; self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1
beta2 weight_decay eps amsgrad maximize grad_scale? found_inf?: _fused_adam _fused_adam_ _fused_adamw _fused_adamw_;
self groups: channel_shuffle; self hermitian?: linalg_ldl_factor; self hermitian? check_errors?: linalg_ldl_factor_ex;
self high dtype? layout? device? pin_memory? memory_format?: randint_like.Tensor randint_like; self high generator
dtype? layout? device? pin_memory? memory_format?: randint_like.Tensor_generator randint_like.generator; self ind?:
linalg_tensorinv; self index: take; self index source accumulate?: put put_; self indices: _unsafe_index.Tensor
dsplit.array hsplit.array index.Tensor vsplit.array; self indices dim?: take_along_dim tensor_split.indices; self
indices max_norm norm_type: embedding_renorm embedding_renorm_; self indices values accumulate?: _unsafe_index_put
index_put index_put_; self indices values accumulate? unsafe?: _index_put_impl _index_put_impl_; self input weight bias
pad: conv_tbc_backward; self input2: orgqr; self input2 input3 left? transpose?: ormqr; self input2 upper?:
cholesky_solve; self k dim? keepdim?: kthvalue; self k dim? largest? sorted?: topk; self k? dims?: rot90; self
keepdim?: nuclear_norm; self kernel_size dilation padding stride: im2col; self kernel_size output_size random_samples:
fractional_max_pool2d fractional_max_pool3d; self kernel_size stride? padding? ceil_mode? count_include_pad?:
avg_pool1d; self kernel_size stride? padding? ceil_mode? count_include_pad? divisor_override?: avg_pool2d avg_pool3d;
self kernel_size stride? padding? dilation? ceil_mode?: max_pool1d max_pool1d_with_indices max_pool2d
max_pool2d_with_indices max_pool3d max_pool3d_with_indices; self lambd?: hardshrink softshrink; self lambd? generator?:
exponential exponential_; self level: _fw_primal; self low high dtype? layout? device? pin_memory? memory_format?:
randint_like.low_dtype; self mask: masked_select; self mask dim? mask_type?: _masked_softmax; self mask indices fill:
_unsafe_masked_index; self mask indices values: _unsafe_masked_index_put_accumulate; self mask source: masked_scatter
masked_scatter_; self mask value: masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor; self
mat vec beta? alpha?: addmv addmv_; self mat1 mat2 beta? alpha?: _sparse_addmm addmm addmm_; self mat1 mat2 beta?
alpha? use_gelu?: _addmm_activation; self mat2: _foreach_mm bmm mm; self mat2 offs? bias? out_dtype?: _grouped_mm; self
max: clamp_max.Tensor clamp_max clamp_max_.Tensor clamp_max_; self mean? std? generator?: log_normal log_normal_
normal_ normal_functional; self median? sigma? generator?: cauchy cauchy_; self memory_format:
is_contiguous.memory_format; self memory_format?: _foreach_clone chalf clone contiguous sym_is_contiguous
prims.clone.default; self memory_format? out: empty_like.out; self min: clamp_min.Tensor clamp_min clamp_min_.Tensor
clamp_min_; self min? max?: clamp.Tensor clamp clamp_.Tensor clamp_ clip.Tensor clip clip_.Tensor clip_; self min_val?
max_val?: hardtanh hardtanh_; self n: linalg_matrix_power matrix_power polygamma_; self n sobolstate dimension
num_generated: _sobol_engine_ff_; self n? dim? norm?: fft_fft fft_hfft fft_irfft fft_rfft; self n? dim? prepend?
append?: diff; self n_fft hop_length? win_length? window? center? pad_mode? normalized? onesided? return_complex?
align_to_window?: stft.center; self n_fft hop_length? win_length? window? normalized? onesided? return_complex?
align_to_window?: stft; self nan? posinf? neginf?: nan_to_num nan_to_num_; self negative_slope?: leaky_relu
leaky_relu_; self non_blocking?: _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long
_cast_Short; self num_classes?: one_hot; self num_parallel skip_first?: _test_parallel_materialize; self num_samples
replacement? generator?: multinomial; self observer_on fake_quant_on running_min running_max scale zero_point
averaging_const quant_min quant_max ch_axis per_row_fake_quant? symmetric_quant?:
_fused_moving_avg_obs_fq_helper_functional; self offset?: diagflat; self offset? dim1? dim2?: diag_embed diagonal
diagonal_copy; self ord dim? keepdim? dtype?: linalg_matrix_norm linalg_norm.ord_str; self ord? dim? keepdim? dtype?:
linalg__powsum linalg_matrix_norm.str_ord linalg_norm linalg_vector_norm; self ord? dtype?: _foreach_norm.Scalar
_foreach_powsum.Scalar; self other: __and__.Scalar __and__.Tensor __iand__.Scalar __iand__.Tensor __ilshift__.Scalar
__ilshift__.Tensor __ior__.Scalar __ior__.Tensor __irshift__.Scalar __irshift__.Tensor __ixor__.Scalar __ixor__.Tensor
__lshift__.Scalar __lshift__.Tensor __or__.Scalar __or__.Tensor __rshift__.Scalar __rshift__.Tensor __xor__.Scalar
__xor__.Tensor _foreach_clamp_max.List _foreach_clamp_max_.List _foreach_clamp_min.List _foreach_clamp_min_.List
_foreach_div.List _foreach_div.Tensor _foreach_div_.List _foreach_div_.Tensor _foreach_maximum.List
_foreach_maximum_.List _foreach_minimum.List _foreach_minimum_.List _foreach_mul.List _foreach_mul.Tensor
_foreach_mul_.List _foreach_mul_.Tensor _has_same_storage_numel _test_functorch_fallback arctan2 arctan2_ atan2 atan2_
bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_and_.Scalar bitwise_and_.Tensor
bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift_.Tensor
bitwise_left_shift_.Tensor_Scalar bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_or_.Scalar
bitwise_or_.Tensor bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
bitwise_right_shift_.Tensor bitwise_right_shift_.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor
bitwise_xor.Tensor bitwise_xor_.Scalar bitwise_xor_.Tensor copysign.Scalar copysign.Tensor copysign_.Scalar
copysign_.Tensor div.Scalar div.Tensor div_.Scalar div_.Tensor divide.Scalar divide.Tensor divide_.Scalar
divide_.Tensor eq.Scalar eq.Tensor eq_.Scalar eq_.Tensor equal floor_divide.Scalar floor_divide floor_divide_.Scalar
floor_divide_.Tensor fmax fmin fmod.Scalar fmod.Tensor fmod_.Scalar fmod_.Tensor gcd gcd_ ge.Scalar ge.Tensor
ge_.Scalar ge_.Tensor greater.Scalar greater.Tensor greater_.Scalar greater_.Tensor greater_equal.Scalar
greater_equal.Tensor greater_equal_.Scalar greater_equal_.Tensor gt.Scalar gt.Tensor gt_.Scalar gt_.Tensor hypot hypot_
igamma igamma_ igammac igammac_ inner is_same_size kron lcm lcm_ ldexp.Tensor ldexp_ le.Scalar le.Tensor le_.Scalar
le_.Tensor less.Scalar less.Tensor less_.Scalar less_.Tensor less_equal.Scalar less_equal.Tensor less_equal_.Scalar
less_equal_.Tensor linalg_matmul logaddexp logaddexp2 logical_and logical_and_ logical_or logical_or_ logical_xor
logical_xor_ lt.Scalar lt.Tensor lt_.Scalar matmul max.other maximum min.other minimum mul.Scalar mul.Tensor
mul_.Scalar mul_.Tensor multiply.Scalar multiply.Tensor multiply_.Scalar multiply_.Tensor ne.Scalar ne.Tensor
ne_.Scalar ne_.Tensor nextafter nextafter_ not_equal.Scalar not_equal.Tensor not_equal_.Scalar not_equal_.Tensor
remainder.Scalar remainder.Scalar_Tensor remainder.Tensor remainder_.Scalar remainder_.Tensor reshape_as
special_gammainc special_gammaincc special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar
special_xlogy special_xlogy.other_scalar special_xlogy.self_scalar special_zeta special_zeta.other_scalar
special_zeta.self_scalar true_divide.Scalar true_divide.Tensor true_divide_.Scalar true_divide_.Tensor type_as vdot
view_as xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor xlogy_.Scalar_Other xlogy_.Tensor prims.add.default
prims.bitwise_and.default prims.bitwise_or.default prims.bitwise_xor.default prims.eq.default prims.fmax.default
prims.fmin.default prims.fmod.default prims.gcd.default prims.ge.default prims.gt.default prims.hypot.default
prims.igamma.default prims.igammac.default prims.le.default prims.lt.default prims.maximum.default
prims.minimum.default prims.mul.default prims.ne.default prims.nextafter.default prims.pow.default
prims.remainder.default prims.shift_left.default prims.shift_right_arithmetic.default prims.sub.default; self other
alpha?: _add_relu.Scalar _add_relu.Tensor _add_relu_.Scalar _add_relu_.Tensor _foreach_add.List _foreach_add.Tensor
_foreach_add_.List _foreach_add_.Tensor _foreach_sub.List _foreach_sub_.List _test_serialization_subcmul add.Scalar
add.Tensor add_.Scalar add_.Tensor rsub.Scalar rsub.Tensor sub.Scalar sub.Tensor sub_.Scalar sub_.Tensor
subtract.Scalar subtract.Tensor subtract_.Scalar subtract_.Tensor; self other dim?: cross linalg_cross; self other
dims?: linalg_tensorsolve; self other dims_self dims_other: tensordot; self other non_blocking? copy? memory_format?:
to.other; self other p?: dist; self other rounding_mode: div.Scalar_mode div.Tensor_mode div_.Scalar_mode
div_.Tensor_mode divide.Scalar_mode divide.Tensor_mode divide_.Scalar_mode divide_.Tensor_mode; self other rtol? atol?
equal_nan?: allclose isclose; self other self_num_batch_dims?: _new_zeros_with_same_feature_meta; self output:
_standard_gamma_grad; self output_size: _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d; self output_size
align_corners scales?: upsample_linear1d; self output_size align_corners scales_d? scales_h? scales_w?:
upsample_trilinear3d; self output_size align_corners scales_h? scales_w?: _upsample_bicubic2d_aa
_upsample_bilinear2d_aa _upsample_lanczos2d_aa upsample_bicubic2d upsample_bilinear2d; self output_size kernel_size
dilation padding stride: col2im; self output_size scales?: _upsample_nearest_exact1d upsample_nearest1d; self
output_size scales_d? scales_h? scales_w?: _upsample_nearest_exact3d upsample_nearest3d; self output_size scales_h?
scales_w?: _upsample_nearest_exact2d upsample_nearest2d; self p: mvlgamma mvlgamma_ special_multigammaln; self p dim
keepdim dtype: norm.ScalarOpt_dim_dtype; self p dim keepdim?: norm.ScalarOpt_dim; self p dim maxnorm: renorm renorm_;
self p dtype: norm.ScalarOpt_dtype; self p generator?: bernoulli.Tensor bernoulli.p bernoulli_.Tensor geometric
geometric_; self p?: _pdist_forward linalg_cond norm.Scalar pdist; self p? generator?: bernoulli_.float; self pad:
_pad_circular; self pad mode value?: _pad_enum; self pad mode? value?: pad; self pad value?: constant_pad_nd; self
padding: reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d; self pivot? check_errors?:
_lu_with_info; self q dim? keepdim? interpolation?: nanquantile nanquantile.scalar quantile quantile.scalar; self r?
with_replacement?: combinations; self rcond hermitian?: linalg_pinv linalg_pinv.rcond_tensor; self rcond?: pinverse;
self reduce_range?: _choose_qparams_per_tensor; self repeats: repeat; self repeats dim? output_size?:
repeat_interleave.self_int; self requires_grad?: requires_grad_; self s? dim? norm?: fft_fft2 fft_fftn fft_hfft2
fft_hfftn fft_ifft2 fft_ifftn fft_ihfft2 fft_ihfftn fft_irfft2 fft_irfftn fft_rfft2 fft_rfftn; self scalar:
_foreach_add.Scalar _foreach_add_.Scalar _foreach_clamp_max.Scalar _foreach_clamp_max_.Scalar _foreach_clamp_min.Scalar
_foreach_clamp_min_.Scalar _foreach_div.Scalar _foreach_div_.Scalar _foreach_maximum.Scalar _foreach_maximum_.Scalar
_foreach_minimum.Scalar _foreach_minimum_.Scalar _foreach_mul.Scalar _foreach_mul_.Scalar _foreach_sub.Scalar
_foreach_sub_.Scalar; self scalars: _foreach_add.ScalarList _foreach_add_.ScalarList _foreach_clamp_max.ScalarList
_foreach_clamp_max_.ScalarList _foreach_clamp_min.ScalarList _foreach_clamp_min_.ScalarList _foreach_div.ScalarList
_foreach_div_.ScalarList _foreach_maximum.ScalarList _foreach_maximum_.ScalarList _foreach_minimum.ScalarList
_foreach_minimum_.ScalarList _foreach_mul.ScalarList _foreach_mul_.ScalarList _foreach_sub.ScalarList
_foreach_sub_.ScalarList; self scale zero_point axis quant_min quant_max: fake_quantize_per_channel_affine
fake_quantize_per_channel_affine_cachemask; self scale zero_point axis quant_min quant_max grad_factor?:
_fake_quantize_learnable_per_channel_affine; self scale zero_point quant_min quant_max: fake_quantize_per_tensor_affine
fake_quantize_per_tensor_affine_cachemask; self scale zero_point quant_min quant_max grad_factor?:
_fake_quantize_learnable_per_tensor_affine; self sections: dsplit.int hsplit.int vsplit.int; self sections dim?:
tensor_split.sections; self shape: _reshape_from_tensor; self shape?: reshape; self shifts dims?: roll; self size:
_reshape_copy broadcast_to sum_to_size view_copy; self size dtype? layout? device? pin_memory?: new_empty; self size
fill_value?: nonzero_static; self size implicit?: expand expand_copy; self size out: new_empty.out; self size stride
dtype? layout? device? pin_memory?: new_empty_strided; self size stride out: new_empty_strided.out; self size?:
_unsafe_view view; self some?: qr; self some? compute_uv?: svd; self sorted? return_inverse?: _unique; self sorted?
return_inverse? return_counts?: _unique2; self source: set.source_Tensor; self source destination: moveaxis.int
moveaxis.intlist movedim.int movedim.intlist; self spacing dim edge_order?: gradient.scalararray
gradient.scalarrayarray gradient.tensorarray; self spacing dim? edge_order?: gradient.scalarrayint
gradient.tensorarrayint; self spacing? dim? edge_order?: gradient.scalarint; self split_size dim?: split.Tensor
split.sizes split_copy.Tensor unsafe_split.Tensor; self split_sizes dim?: split_with_sizes unsafe_split_with_sizes;
self split_sizes? dim?: split_with_sizes_copy; self src dim index: select_scatter; self src dim? start? end? step?:
slice_scatter; self src non_blocking?: _foreach_copy_ copy copy_; self src offset? dim1? dim2?: diagonal_scatter; self
src size stride storage_offset: prims.as_strided_scatter.default; self stable dim? descending?: argsort.stable
sort.stable; self start_dim? end_dim?: flatten.using_ints; self target margin? reduction?: hinge_embedding_loss; self
target p? margin? weight? reduction?: multi_margin_loss; self target reduction: multilabel_margin_loss_forward; self
target reduction?: l1_loss mse_loss multilabel_margin_loss soft_margin_loss; self target reduction? beta?:
smooth_l1_loss; self target reduction? delta?: huber_loss; self target reduction? log_target?: kl_div; self target
weight reduction ignore_index: nll_loss2d_forward nll_loss_forward; self target weight? pos_weight? reduction?:
binary_cross_entropy_with_logits; self target weight? reduction?: binary_cross_entropy; self target weight? reduction?
ignore_index?: nll_loss nll_loss_nd; self target weight? reduction? ignore_index? label_smoothing?: cross_entropy_loss;
self tensor: dot; self tensor1 tensor2 scalars: _foreach_addcdiv.ScalarList _foreach_addcdiv.Tensor
_foreach_addcdiv_.ScalarList _foreach_addcdiv_.Tensor _foreach_addcmul.ScalarList _foreach_addcmul.Tensor
_foreach_addcmul_.ScalarList _foreach_addcmul_.Tensor; self tensor1 tensor2 value?: _foreach_addcdiv.Scalar
_foreach_addcdiv_.Scalar _foreach_addcmul.Scalar _foreach_addcmul_.Scalar addcdiv addcdiv_ addcmul addcmul_; self
tensor_indices_or_sections dim?: tensor_split.tensor_indices_or_sections; self tensors1 weight: _foreach_lerp.Scalar
_foreach_lerp.ScalarList _foreach_lerp_.Scalar _foreach_lerp_.ScalarList; self tensors1 weights: _foreach_lerp.List
_foreach_lerp_.List; self threshold value: threshold threshold_; self to generator?: random.to random_.to; self tol
hermitian?: linalg_matrix_rank; self unbiased?: std std_mean var var_mean; self upper?: cholesky cholesky_inverse
linalg_cholesky; self upper? check_errors?: linalg_cholesky_ex; self upscale_factor: pixel_shuffle; self value:
fill.Tensor fill_.Scalar fill_.Tensor prims.fill.default; self values: heaviside heaviside_; self vec: mv; self vec1
vec2 beta? alpha?: addr addr_; self vec2: ger outer; self weight: _prelu_kernel prelu; self weight bias pad?: conv_tbc;
self weights? minlength?: bincount; self? dtype? layout? device? pin_memory? memory_format?: ones_like zeros_like;
self? fill_value dtype? layout? device? pin_memory? memory_format?: full_like; self? size? dtype? layout? device?
pin_memory?: new_ones new_zeros; self? size? fill_value dtype? layout? device? pin_memory?: new_full; self? value:
fill.Scalar; sequences batch_first? padding_value? padding_side?: pad_sequence; shape fill_value dtype device
requires_grad: prims.full.default; shape low high dtype device stride generator?: prims.uniform.default; shape mean std
dtype device requires_grad generator?: prims.normal.default; size dtype? layout? device? pin_memory?: rand randn; size
dtype? layout? device? pin_memory? memory_format?: empty.memory_format; size dtype? layout? device? pin_memory? scale?
zero_point? memory_format?: _empty_affine_quantized; size generator dtype? layout? device? pin_memory?: rand.generator
randn.generator; size memory_format? out: empty.out; size min? max?: sym_constrain_range sym_constrain_range_for_size;
size physical_layout dtype? layout? device? pin_memory?: empty_permuted; size physical_layout out: empty_permuted.out;
size qtensor dtype? layout? device? pin_memory? memory_format?: empty_quantized; size qtensor memory_format? out:
empty_quantized.out; size scale? zero_point? memory_format? out: _empty_affine_quantized.out; size scales zero_points
axis dtype? layout? device? pin_memory? memory_format?: _empty_per_channel_affine_quantized; size scales zero_points
axis memory_format? out: _empty_per_channel_affine_quantized.out; size seed mode align_dtype?:
prims.inductor_random.default; size stride dtype? layout? device? pin_memory?: empty_strided; size stride out:
empty_strided.out; size? dtype? layout? device? pin_memory?: ones zeros; size? fill_value dtype? layout? device?
pin_memory?: full; sorted_sequence self out_int32? right? side? sorter?: searchsorted.Scalar searchsorted.Tensor;
sparse dense: _sparse_mm; start end dtype? layout? device? pin_memory?: arange.start range; start end step? dtype?
layout? device? pin_memory?: arange.start_step range.step; start end steps base? dtype? layout? device? pin_memory?:
logspace; start end steps dtype? layout? device? pin_memory?: linspace.Scalar_Tensor linspace.Tensor_Scalar
linspace.Tensor_Tensor linspace; tensor: _c10d_functional.wait_tensor.default; tensor a b generator?:
_no_grad_uniform_; tensor mean std generator?: _no_grad_normal_; tensor other: result_type.Scalar result_type.Tensor;
tensors: _to_cpu atleast_1d.Sequence atleast_2d.Sequence atleast_3d.Sequence block_diag broadcast_tensors
cartesian_prod column_stack dstack flatten_dense_tensors hstack linalg_multi_dot meshgrid row_stack vstack; tensors
dim: prims.cat.default; tensors dim num_chunks: _chunk_cat; tensors dim?: _stack cat concat concatenate stack; tokens:
prims._sink_tokens.default; type1 type2: promote_types; v pow? dim?: norm_except_dim; values addends:
_test_optional_filled_intlist _test_optional_floatlist _test_optional_intlist; values offsets max_lengths
padding_value?: _jagged_to_padded_dense_forward; weight: _saturate_weight_to_fp16; weight indices padding_idx?
scale_grad_by_freq? sparse?: embedding; window_length dtype? layout? device? pin_memory?: bartlett_window
blackman_window hamming_window hann_window kaiser_window; window_length periodic alpha beta dtype? layout? device?
pin_memory?: hamming_window.periodic_alpha_beta; window_length periodic alpha dtype? layout? device? pin_memory?:
hamming_window.periodic_alpha; window_length periodic beta dtype? layout? device? pin_memory?: kaiser_window.beta;
window_length periodic dtype? layout? device? pin_memory?: bartlett_window.periodic blackman_window.periodic
hamming_window.periodic hann_window.periodic kaiser_window.periodic; x: special_airy_ai
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
bitproof.offload.default bitproof.wait_reload.default; x N?: linalg_vander; x N? increasing?: vander; x alpha total:
_dirichlet_grad; x n: special_chebyshev_polynomial_t special_chebyshev_polynomial_t.n_scalar
special_chebyshev_polynomial_t.x_scalar special_chebyshev_polynomial_u special_chebyshev_polynomial_u.n_scalar
special_chebyshev_polynomial_u.x_scalar special_chebyshev_polynomial_v special_chebyshev_polynomial_v.n_scalar
special_chebyshev_polynomial_v.x_scalar special_chebyshev_polynomial_w special_chebyshev_polynomial_w.n_scalar
special_chebyshev_polynomial_w.x_scalar special_hermite_polynomial_h special_hermite_polynomial_h.n_scalar
special_hermite_polynomial_h.x_scalar special_hermite_polynomial_he special_hermite_polynomial_he.n_scalar
special_hermite_polynomial_he.x_scalar special_laguerre_polynomial_l special_laguerre_polynomial_l.n_scalar
special_laguerre_polynomial_l.x_scalar special_legendre_polynomial_p special_legendre_polynomial_p.n_scalar
special_legendre_polynomial_p.x_scalar special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_t.n_scalar special_shifted_chebyshev_polynomial_t.x_scalar
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_u.n_scalar
special_shifted_chebyshev_polynomial_u.x_scalar special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_v.n_scalar special_shifted_chebyshev_polynomial_v.x_scalar
special_shifted_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_w.n_scalar
special_shifted_chebyshev_polynomial_w.x_scalar; x y dim?: linalg_vecdot; x1 x2: _euclidean_dist; x1 x2 dim? eps?:
cosine_similarity; x1 x2 p compute_mode: _cdist_forward; x1 x2 p? compute_mode?: cdist; x1 x2 p? eps? keepdim?:
pairwise_distance; y dx? dim?: cumulative_trapezoid.dx trapezoid.dx trapz.dx; y x dim?: cumulative_trapezoid.x
trapezoid.x trapz.x;
"""
"""Argument names of the operators that a proof may contain, from torch's schemas: "names: operators;".

An operator without namespace is in `aten`, and one without overload is `.default`. An argument with `?` may be missing,
as it has a default, or the result's layout implies it.
"""


def _signatures() -> Iterator[tuple[str, tuple[set[str], set[str]]]]:
    """Yield (operator, (required argument names, all argument names)) for each known operator."""
    rows = [(x, map(_in_full, y.split())) for x, y in re.findall("([^:;]*):([^;]*);", SIGNATURES)]
    for signature, operators in [*rows, *((x, [word]) for word, x in WORDS_TAKE.items())]:
        names = signature.split()
        takes = {x for x in names if not x.endswith("?")}, {x.rstrip("?") for x in names}
        yield from ((operator, takes) for operator in operators)


def _in_full(short: str) -> str:
    """Return an operator's full name: `aten.abs.default` for `abs`, `aten.add.Tensor` for `add.Tensor`."""
    dots = short.count(".")
    return short if dots > 1 else f"aten.{short}" if dots else f"aten.{short}.default"


TAKES = dict(_signatures())


# -- Answers -----------------------------------------------------------------------------------------

NAN = "no value is a NaN: which of a NaN's bits survive depends on instructions and on operand order"
ASSUMPTIONS = (
    ("", "torch traces what eager runs, fake values lie as real ones do, and operators write what schemas say"),
    (
        "",
        "a kernel's bits depend on arguments, dtypes, devices, shapes, strides, place in a line (64 bytes; CUDA: 256)",
    ),
    ("", "memory is allocated at such lines, and no two inputs of the step share any"),
    ("", "a sum, difference, product or cast is the nearest number, ties to even, denormals kept, wherever it stands"),
    ("", "a number beside float32 is rounded to it first; what only carries elements changes none"),
    ("", NAN),
    ("", "both runs reach their end: checks that raise compute nothing"),
    (C10D, "ranks run one program; a collective's bits depend on ranks in order, sizes, dtypes, values"),
    ("reduce_of_cat", "each element is reduced over ascending ranks, whatever is beside it: NCCL does not promise it"),
    ("_fused_adam", "an optimizer's kernel takes elements that lie in rows one by one, wherever they lie"),
    ("_fused_adamw", "an optimizer's kernel takes elements that lie in rows one by one, wherever they lie"),
    ("_grouped_mm", "offsets of grouped matrix products end at the last row: beyond it is memory that nobody wrote"),
)


def _outputs(g: State, graph: Json) -> dict[str, tuple[Json, Json]]:
    """Return output name -> (final term, initial term). The final term is None for a refused output.

    An input or constant NAME is also an output, named `written NAME`: its final value. All other outputs have the
    initial term -1.
    """
    found = {f"written {name}": (n, was) for name, (n, was) in g["inputs"].items()}
    hold(
        len({*found, *(name for name, _ in graph["outputs"])}) == len(found) + len(graph["outputs"]),
        "a name stands for two outputs",
    )
    found |= {name: (n, -1) for name, n in graph["outputs"]}
    values = {}
    for name, (n, was) in found.items():
        value = known(g, n)
        is_flying = any(g["filling"].get(x[5]) for x in g["calls"][n]["results"])
        values[name] = None if is_flying else value, was
    return values


def is_whole_step(graph: Json) -> bool:
    """Return whether the graph includes the optimizer's update: an optimizer state is among its inputs."""
    return any(call[1] == "input" and call[0].startswith("optimizer ") for call in graph["calls"])


def answers_of(state: State, sides: list[State], graphs: list[Json]) -> list[list[str]]:
    """Return [name, answer] for each output. An input that neither graph changes is left out.

    The answer is PROVED, NOT PROVED or REFUSED. `sides` has the final state of each graph's walk.
    """
    one, other = (_outputs(g, graph) for g, graph in zip(sides, graphs, strict=True))
    is_whole, found = is_whole_step(graphs[0]), []
    for name in {**one, **other}:
        (a, a_was), (b, b_was) = one.get(name, (None, None)), other.get(name, (None, None))
        if a == a_was and b == b_was:
            continue
        if type(a) is not int or type(b) is not int:
            found.append([name, "REFUSED"])
        elif a != b:
            found.append([name, "NOT PROVED"])
        else:
            # Two constants are equal whatever the step computes, so an output must depend on a parameter and an input.
            shows = (is_whole and name.startswith("written ")) or state["roots"][a] == {*ROOTS}
            found.append([name, "PROVED" if shows else "REFUSED"])
    return found


def assumed(operators: Iterable[str], rules: Iterable[str]) -> list[str]:
    """Return the texts of the assumptions that a proof with these operators and rules makes."""
    used = {"", *rules, *(name for operator in {*operators} for name in operator.split(".")[:2])}
    return [text for name, text in ASSUMPTIONS if name in used]


def check_assumptions(graphs: list[Json], steps: Json, assumptions: list[str]) -> None:
    """Raise RejectedError unless the certificate lists all assumptions of its proof. It may list more."""
    operators = (call[1] for graph in graphs for call in graph["calls"])
    missing = [text for text in assumed(operators, (step[1] for step in steps)) if text not in assumptions]
    hold(not missing, f"it does not list the assumption: {''.join(missing[:1])}")


def check_answers(main: Json, answers: list[list[str]]) -> None:
    if sorted(answers) != sorted(main["answers"]):
        others = (f"{name} is {verdict}" for name, verdict in answers if [name, verdict] not in main["answers"])
        raise RejectedError(f"outputs and answers differ: {', '.join(others)}")


def check_subject(main: Json, graphs: list[Json]) -> None:
    """Raise RejectedError if the graphs contradict the case that the certificate states.

    The graphs must have the inputs and outputs of a training step, in order, and all collectives must be among the
    case's ranks.
    """
    # Only a new trace could show that the graphs are those of the case.
    subject = main["subject"]
    names = {"case", "code", "torch", "machine", "outputs", "extra_passes", "precompiled"}
    hold(type(subject) is dict, "it does not say what it is about")
    hold({*subject} == names, f"what it is about has other parts than {', '.join(sorted(names))}")
    texts = (subject["case"], subject["code"], subject["torch"], subject["machine"], *subject["extra_passes"])
    hold(all(type(text) is str for text in texts), "a part of its subject is no text")
    hold(subject["precompiled"] in (0, 1), "precompiled is neither 0 nor 1")
    hold(type(subject["outputs"]) is type(subject["extra_passes"]) is list, "its outputs or passes are no list")
    hold(re.fullmatch("[0-9a-f]{64}", subject["code"]), f"{subject['code']} is no digest of code")
    hold(re.fullmatch(r"\w+", subject["machine"]), f"{subject['machine']} is no kind of machine")
    case = json.loads(subject["case"])
    hold(case["name"] == main["case"], f"it names case {main['case']}, and holds case {case['name']}")
    # Name and layout of each input, without its storage: storages are numbered by graph.
    inputs = [[[call[0], call[3]["tensor"][:5]] for call in g["calls"] if call[1] == "input"] for g in graphs]
    if inputs[0] != inputs[1]:
        unlike = dict.fromkeys(x for one, other in (inputs, inputs[::-1]) for x, own in one if [x, own] not in other)
        raise RejectedError(f"the graphs' inputs are not the same, in one order: {', '.join(unlike)}")
    kinds = ["".join(x.partition(" ")[:2]) for x, _ in inputs[0]]
    order = [kind for kind in ("parameter ", "buffer ", "input ", "optimizer ") for x in kinds if x == kind]
    hold(kinds == order, "inputs are not parameters, buffers, inputs and state, in this order")
    numbered = [name for name, _ in inputs[0] if name.startswith("input ")]
    hold(numbered == [f"input {k}" for k in range(len(numbered))], "inputs are not numbered from 0 on")
    parameters = [name.partition(" ")[2] for name, _ in inputs[0] if name.startswith("parameter ")]
    outputs = ["loss", *(f"gradient of {name}" for name in parameters)]
    for side, graph in zip(SIDES, graphs, strict=True):
        returned = [name for name, _ in graph["outputs"]]
        others = ", ".join(sorted({*returned} ^ {*outputs})) or "in another order"
        hold(returned == outputs, f"the {side} does not return the step's outputs: {others}")
        # Optimizer state is read by the update, which follows the step's calls.
        first = graph["calls"][: len(kinds) - kinds.count("optimizer ")]
        hold(all(call[1] == "input" for call in first), "inputs do not come first")
        for call in graph["calls"]:
            group = dict(call[2]).get("group_name", [""])
            ranks = sorted(rank for each in group[1] for rank in each) if group[0] == "ranks" else None
            hold(ranks in (None, [*range(case["parallelism"]["world_size"])]), f"{call[0]} is among other ranks")
    hold(subject["outputs"] == outputs, "its list of outputs is not that of its graphs")
    # The answers to a whole step must include the final value of each parameter.
    kept = {f"written parameter {name}" for name in parameters} - {name for name, _ in main["answers"]}
    hold(not is_whole_step(graphs[0]) or not kept, f"a whole step without {', '.join(sorted(kept))}")


# -- Files -------------------------------------------------------------------------------------------


def parse(content: bytes) -> Json:
    """Parse JSON that contains only objects, arrays, strings, integers and null.

    Raises RejectedError for a number with a fraction or exponent, NaN, an infinity, a truth value, or a name that
    occurs twice in an object.
    """

    def refuse(text: str) -> None:
        raise RejectedError(f"the value {text}")

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        hold(len(dict(pairs)) == len(pairs), "a name stands twice")
        return dict(pairs)

    # 1, 1.0 and True are equal in Python but have different texts, and values are compared in both ways.
    found = json.loads(content.decode(), object_pairs_hook=unique, parse_float=refuse, parse_constant=refuse)
    # The search in the bytes is cheap, and mostly saves a walk through all values.
    hold(not (b"true" in content or b"false" in content) or not _has_truth(found), "a truth value")
    return found


def _has_truth(value: Json) -> bool:
    if type(value) is list:
        return any(map(_has_truth, value))
    return type(value) is bool or (type(value) is dict and any(map(_has_truth, value.values())))


def check_form(main: Json, graphs: list[Json], steps: Json) -> None:
    """Raise RejectedError unless each file has the form that docs/reference/certificate.md describes."""
    parts = "format", "case", "files", "answers", "assumptions", "subject"
    hold({*main} == {*parts}, f"its parts are not {', '.join(parts)}")
    hold(
        main["format"] == FORMAT,
        f"a certificate of format {main['format']}, which is not {FORMAT}: made by another version",
    )
    for text in (main["case"], *main["assumptions"]):
        hold(type(text) is str, f"{str(text)[:80]} is no text")
    hold(all(len(x) == 2 and {*map(type, x)} == {str} for x in main["answers"]), "no answer")
    hold(type(steps) is list, "no steps")
    for graph in graphs:
        hold({*graph} == {"outputs", "calls"}, "a graph has other parts")
        hold(all(type(name) is str and _is_count(n) for name, n in graph["outputs"]), "no output")
        for name, op, args, own, writes, random, _ in graph["calls"]:
            texts = (name, op, *(x for x, _ in args), *writes)
            is_call = type(args) is type(writes) is list and all(type(x) is str for x in texts) and random in (0, 1)
            hold(is_call and len({x for x, _ in args}) == len(args), f"{name} is no call")
            hold(fits(op, [x for x, _ in args]), f"{name}: {op} has no such arguments: {', '.join(x for x, _ in args)}")
            hold(_is_value(own), f"{name} has no value")


def _is_value(own: Json) -> bool:
    if type(own) is not dict:
        return own is None or _is_size(own)
    [(kind, found)] = own.items()
    if kind == "several":
        return type(found) is list and all(map(_is_value, found))
    dtype, device, shape, strides, offset, storage = found
    sizes = (*shape, *strides, offset)
    is_tensor_ = kind == "tensor" and type(dtype) is type(device) is str and len(shape) == len(strides)
    are_sizes = _are_counts([*sizes]) or all(map(_is_size, sizes))
    return is_tensor_ and type(shape) is type(strides) is list and are_sizes and _is_count(storage)


def _is_size(x: Json) -> bool:
    if type(x) is int:
        return x >= 0
    if type(x) is not list or x[:1] != ["size"]:
        return False
    return all(p and type(p[0]) is int and all(type(name) is str for name in p[1:]) for p in x[1:])


def read(folder: Path) -> tuple[Json, list[Json], Json]:
    main, *graphs, steps = (parse(content) for content in _sealed(folder).values())
    return main, graphs, steps


def _sealed(folder: Path) -> dict[str, bytes]:
    """Return file name -> bytes for the certificate's files.

    Raises RejectedError if a digest in SHA256SUMS or in the main file does not match its file.
    """
    contents = {name: _content(folder / name) for name in FILES}
    # SHA256SUMS lists all files; the main file lists the others, so a signature of the main file covers all.
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    # Symmetric differences: an entry that only one side has is wrong as well. In a line, the name begins at 66.
    lines = {f"{digest}  {name}" for name, digest in sums.items()} ^ {*_content(folder / SUMS).decode().splitlines()}
    listed = parse(contents[MAIN])["files"]
    sealed = {(name, sums[name]) for name in PARTS} ^ {(name, digest) for name, digest in listed}
    unlike = {line[66:] for line in lines} | {name for name, _ in sealed}
    hold(not unlike and len(listed) == len(PARTS), f"not what was certified: {', '.join(sorted(unlike))}")
    return contents


def _content(file: Path) -> bytes:
    # Opening a named pipe would wait for a writer; O_NONBLOCK prevents that.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as opened:
        hold(stat.S_ISREG(os.fstat(opened.fileno()).st_mode), f"{file.name} is no regular file")
        # One byte more than allowed: a longer file is noticed without reading all of it.
        content = opened.read(MOST_BYTES + 1)
    hold(len(content) <= MOST_BYTES, f"{file.name} has more than {MOST_BYTES} bytes")
    return content


def check(main: Json, graphs: list[Json], steps: Json, *, with_subject: bool = True) -> Counter[str]:
    """Check a certificate. Return the number of outputs by answer (PROVED, NOT PROVED, REFUSED).

    Raises RejectedError if the certificate is damaged or claims more than it proves. `with_subject` is False only in
    tests.
    """
    with rejecting():
        # All later functions rely on the form, so it is checked first.
        check_form(main, graphs, steps)
        state = new_state()
        for step in steps:
            take_step(state, step)
        sides = [walk(state, graph, side) for graph, side in zip(graphs, SIDES, strict=True)]
        found = answers_of(state, sides, graphs)
        check_answers(main, found)
        check_assumptions(graphs, steps, main["assumptions"])
        if with_subject:
            check_subject(main, graphs)
    return Counter(verdict for _, verdict in found)


def covers_any_number(main: Json, graphs: list[Json]) -> bool:
    """Return whether an accepted certificate holds for any number of training steps, not only for a single step.

    It must prove every output of a whole step, and the step must draw no random numbers.
    """
    calls = [call for graph in graphs for call in graph["calls"]]
    return (
        is_whole_step(graphs[0])
        and not any(call[5] for call in calls)
        and all(verdict == "PROVED" for _, verdict in main["answers"])
    )


def check_folder(folder: Path) -> Counter[str]:
    return check(*load(folder))


def load(folder: Path) -> tuple[Json, list[Json], Json]:
    """Return the content of a certificate's files: (main file, graphs, steps).

    Raises RejectedError if they are damaged or have an unexpected form.
    """
    with rejecting():
        return read(folder)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    gc.disable()  # it would inspect millions of lists again and again, and there are no cycles to free
    try:
        head, graphs, steps = load(Path(arguments[0]))
        counts = check(head, graphs, steps)
    except RejectedError as error:
        print(f"REJECTED: {str(error)!a}")
        return 3
    print("accepted:", ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print("covers", "any number of steps from equal state" if covers_any_number(head, graphs) else "one step")
    return 0 if [*counts] == ["PROVED"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
