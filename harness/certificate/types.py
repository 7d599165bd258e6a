"""The type of each kind of term, derived from the types of its parts.

A tensor's type is its dtype and shape, with None for a data-dependent size. The type of any other term is one of three
strings. The types of inputs, constants, fresh memory and opaque operators are those stated by the graph (see
docs/explanation/proving.md). Types do not include devices.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from math import inf, isfinite, prod
from typing import Any

from bitproof.harness.certificate import windows
from bitproof.harness.certificate.data import FLOATS, WHOLE, Term
from bitproof.harness.certificate.errors import RejectedError, require

NUMBER, STATE, SEVERAL = "a number", "a generator's state", "several results"
SIDES = ("reference", "candidate")
COMPARISONS = dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 2)
BITWISE = {"bitwise_not": 1, "bitwise_and": 2, "bitwise_or": 2, "bitwise_xor": 2}
ARITY = {"cast": 1, "where": 3, "neg": 1, "add": 2, "sub": 2, "mul": 2} | COMPARISONS | BITWISE
FORMS = {"float64": ("<d", 0), "float32": ("<f", 0), "bfloat16": ("<f", 2), "float16": ("<e", 0)}
"""The struct format of a number, and the number of its bytes that the dtype drops."""
WORDS = ("bool", "float", "str", "dtype", "device", "enum")
"""Kinds of arguments with a single string."""

Type = tuple[str, tuple[int | None, ...]] | str


def shape_of(found: Type) -> tuple[int, ...]:
    """The shape of a tensor's type. Raises RejectedError for any other type, and for a data-dependent size."""
    require(not isinstance(found, str) and None not in found[1], lambda: f"{found} has no shape that is numbers")
    return found[1]  # type: ignore[return-value]


def type_of(term: Term, types: Sequence[Type]) -> Type:
    """The type of a term whose parts have these types. Raises RejectedError if they do not fit."""
    match term:
        case ("view", base, shape, strides, offset):
            w, size = (_sizes(shape), _sizes(strides), offset), prod(shape_of(types[base]))
            last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            is_inside = type(offset) is int and windows.normal(*w) == w and (0 in shape or 0 <= offset <= last < size)
            require(is_inside, "a window shows what is not there, or has another form")
            return types[base][0], shape
        case ("op" | "move" as kind, str(), arguments, dtype, shape):
            for name, value in arguments:
                require(type(name) is str, "an argument's name is no text")
                _check_argument(value, types, STATE if name == "generator" and kind == "op" else kind)
            return SEVERAL if dtype is None and shape is None else (_text(dtype), _pattern(shape))
        case ("exact", operator, dtype, str(), operands):
            require(ARITY.get(operator) == len(operands), lambda: f"{operator} of {len(operands)} operands")
            told = [_tensor(types[x]) for x in operands]
            of_one_shape, listed = len({shape for _, shape in told}) == 1, (list(shape) for _, shape in told)
            require(of_one_shape, lambda: f"{operator} of operands of other shapes: {[*listed]}")
            dtypes = tuple(x for x, _ in told)
            require(is_exact(operator, dtype, dtypes), lambda: f"{operator} to {dtype} of {[*dtypes]}")
            return dtype, told[0][1]
        case ("cat", (first, *_) as parts, dim):
            rank = len(shape_of(types[first]))
            require(type(dim) is int and 0 <= dim < rank, lambda: f"{dim} is no dim of {rank}")
            shapes = [shape_of(types[x]) for x in parts]
            fits = {(types[x][0], windows.put(shape, dim, 0)) for x, shape in zip(parts, shapes, strict=True)}
            require(len(fits) == 1 and {*map(len, shapes)} == {rank}, "parts do not fit")
            return types[first][0], windows.put(shapes[0], dim, sum(shape[dim] for shape in shapes))
        case ("number", str(dtype), str(text)):
            value = float.fromhex(text)
            require(value.hex() == text and has(dtype, value), lambda: f"{text} is no number of {dtype}")
            return dtype, ()
        case ("gather", below, ranks):
            return types[below][0], (_num_ranks(ranks), *shape_of(types[below]))
        case ("reduce", below, str(operation), ranks):
            dtype, shape = types[below][0], shape_of(types[below])
            require(len(shape) == 2 and shape[0] == _num_ranks(ranks), f"{list(shape)} are not each rank's columns")
            require(operation.split(" on ")[0].endswith(f" in {dtype}"), f"{operation} of {dtype}")
            return dtype, shape[1:]
        case ("input" | "constant", str(), str(dtype), shape):
            return dtype, _sizes(shape)
        case ("out", several, index, str(dtype), shape):
            require(types[several] == SEVERAL and type(index) is int and index >= 0, f"{index} of {types[several]}")
            return dtype, _pattern(shape)
        case ("item", below):
            require({*_tensor(types[below])[1]} <= {1, None}, "a number is read from a tensor of several")
            return NUMBER
        case ("extent", below, index):
            found = types[below]
            is_open = found == SEVERAL or (not isinstance(found, str) and [*found[1], 0][: index + 1][-1] is None)
            require(type(index) is int and index >= 0 and is_open, f"size {index} of {found} is no matter of data")
            return NUMBER
        case ("rows", sizes):
            _check_sizes(sizes, types)
            return NUMBER
        case ("draws", below):
            _tensor(types[below])
            return STATE
        case ("seed",):
            return STATE
        case ("fresh", side, call, dtype, shape):
            require(side in SIDES and type(call) is int and call >= 0, f"{side}, call {call}, is no call")
            return STATE if (dtype, shape) == ("generator", ()) else (_text(dtype), _pattern(shape))
    raise RejectedError(f"a term of no known kind: {str(term)[:80]}")


def is_exact(operator: str, own: str, dtypes: tuple[str, ...]) -> bool:
    """Whether an exact operator returns a dtype for operands of these dtypes."""
    if operator == "cast":
        return {own, *dtypes} <= {*FLOATS}
    if operator == "where":
        return dtypes == ("bool", own, own) and own in (*FLOATS, *WHOLE, "bool")
    known = (*WHOLE, "bool") if operator in BITWISE else (*FLOATS, *WHOLE)
    gives = "bool" if operator in COMPARISONS else dtypes[0]
    return dtypes[0] in known and {*dtypes} == {dtypes[0]} and own == gives


def has(dtype: str, value: float) -> bool:
    """Whether a dtype has a number: packing and unpacking does not change it. -0.0 is no integer."""
    if dtype not in FORMS:
        least, most = {"bool": (0, 1), "int32": (1 - 2**31, 2**31 - 1), "int64": (-(2**53), 2**53)}.get(dtype, (1, 0))
        return least <= value <= most and value.is_integer() and value.hex() != "-0x0.0p+0"
    return isfinite(value) and nearest(value, *FORMS[dtype]) == value


def nearest(value: float, form: str = "<f", missing: int = 0) -> float:
    """A number after packing and unpacking; infinity if it is too large."""
    try:
        packed = struct.pack(form, value)
    except OverflowError:
        return inf
    return float(struct.unpack(form, bytes(missing) + packed[missing:])[0])


def _tensor(found: Type) -> tuple[str, tuple[int | None, ...]]:
    if isinstance(found, str):
        raise RejectedError(f"{found} is no tensor")
    return found


def _text(value: Any) -> str:
    require(type(value) is str, lambda: f"{value} is no dtype")
    return str(value)


def _pattern(shape: Any) -> tuple[int | None, ...]:
    _sizes(tuple(n for n in shape if n is not None))
    return tuple(shape)


def _sizes(shape: Any) -> tuple[int, ...]:
    require(type(shape) is tuple and all([type(n) is int and n >= 0 for n in shape]), lambda: f"{shape} are no sizes")
    return tuple(shape)


@functools.lru_cache(maxsize=1 << 10)
def _num_ranks(groups: Any) -> int:
    """The number of ranks in each instance of a group: all have equally many, and no rank occurs twice."""
    ranks = _sizes(tuple(rank for group in groups for rank in group))
    fits = len({len(group) for group in groups}) == 1 and len({*ranks}) == len(ranks) > 0
    require(fits, f"{groups} are no instances of one group")
    return len(groups[0])


def _check_argument(value: Any, types: Sequence[Type], kind: str) -> None:
    """Check that an opaque operator's operands have the types that it states."""
    match value:
        case int():
            pass
        case ("tensor", place, dtype, str(), shape, strides, lead) if kind == "op":
            told = dtype, tuple(n if type(n) is int else None for n in shape)
            require(types[place] == told, lambda: f"{types[place]} is read as {told}")
            require(len(strides) == len(shape), lambda: f"{len(strides)} strides for {len(shape)} dims")
            _check_sizes((*shape, *strides, lead), types)
        case ("value", place) if kind == "move":
            _tensor(types[place])
        case ("value", place) if kind == STATE:
            require(types[place] == STATE, f"a random call draws from {types[place]}")
        case ("list", *items):
            for item in items:
                _check_argument(item, types, kind)
        case ("size", *_):
            _check_sizes((value,), types, least=None)
        case ("none",) | ("graph", _):
            pass
        case ("ranks", groups):
            _num_ranks(groups)
        case (word, str()) if word in WORDS:
            pass
        case _:
            raise RejectedError(f"an argument of no known kind: {str(value)[:80]}")


def _check_sizes(sizes: Any, types: Sequence[Type], least: int | None = 0) -> None:
    """Check that sizes are integers, or sums of products of numbers that were read."""
    for size in sizes:
        match size:
            case int():
                require(least is None or size >= least, f"{size} is no size")
            case ("size", *products):
                for coefficient, *places in products:
                    is_product = type(coefficient) is int and all(types[x] == NUMBER for x in places)
                    require(is_product, f"{size} is no sum of products of numbers")
            case _:
                raise RejectedError(f"{size} is no size")
