"""Operators that a proof knows. Any other is opaque: its results are equal only if its operands and layouts are."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitproof.harness.certificate.data import Call
from bitproof.harness.operators import (
    COMMUNICATES,
    ROWS,
    Operator,
    Uninitialized,
    named,
    names_of_uninitialized,
    overloads,
)

FLOATS = {"float64", "float32", "bfloat16", "float16"}
"""Real dtypes in which one operation is one rounding."""

WHOLE = {"int64", "int32"}


def _name(row: Operator) -> str:
    return row.name.partition(".")[2]


def _by_default(holds: Callable[[Operator], object]) -> frozenset[str]:
    """The full names, with the overload `default`, of operators with a property."""
    return frozenset(row.overload("default") for row in ROWS.values() if holds(row))


EXACT = {
    row.overload(end): _name(row)
    for row in ROWS.values()
    if row.exact
    for end in (("Tensor", "Scalar") if row.exact == "Tensor" else (row.exact,))
}
"""Operators that give each element of their result from the elements at its place alone, where `is_exact` says so of
their dtypes and alpha is 1. A number as an operand is a tensor that holds it everywhere, if the dtype has it exactly.

Any other number is kept in a wider dtype than bfloat16 and float16, so `x + 0.1` is left opaque there; division is by a
reciprocal on some devices, powers and roots have vector bodies that differ from their tails, max and min tell no +0
from -0 in one order.
"""


def is_exact(name: str, own: str, operands: Sequence[str]) -> bool:
    """Whether an operator of EXACT is exact from operands of these dtypes to a result of dtype `own`, which torch gave
    it: comparisons give bool, all others what they take."""
    dtypes = {*operands}
    if name == "cast":
        return {own, *dtypes} <= FLOATS
    if name == "where":
        return operands[0] == "bool" and {*operands[1:]} == {own} and own in FLOATS | WHOLE | {"bool"}
    known = WHOLE | ({"bool"} if name.startswith("bitwise") else FLOATS)
    return len(dtypes) == 1 and dtypes <= known and own in ("bool", *dtypes)


_RANGES = {
    "float64": (53, -1074, 1024),
    "float32": (24, -149, 128),
    "bfloat16": (8, -133, 128),
    "float16": (11, -24, 16),
}
_RANGES |= {"int64": (53, 0, 54), "int32": (31, 0, 31), "bool": (1, 0, 1)}
"""Binary digits of a number, the exponent of the lowest digit, and of the first number that is too large."""


def holds(dtype: str, number: float) -> bool:
    """Whether a dtype has a number exactly; numbers of more than 53 digits are passed over.

    No whole number is -0.0."""
    is_negative = math.copysign(1.0, number) < 0 and (dtype == "bool" or (number == 0 and dtype not in FLOATS))
    if dtype not in _RANGES or not math.isfinite(number) or is_negative:
        return False
    digits, least, beyond = _RANGES[dtype]
    numerator, denominator = number.as_integer_ratio()
    lowest = (numerator & -numerator).bit_length() - denominator.bit_length()
    above = math.frexp(number)[1]
    return number == 0 or (above - lowest <= digits and lowest >= least and above <= beyond)


def number_in(argument: Any, dtype: str) -> float | None:
    """The number that an argument of a call is in a dtype; None for what is none, or none that the dtype has.

    Kernels keep a real number in at least 32 bits, as float32 where the tensor is: there it is rounded, once.
    """
    match argument:
        case int():
            number = float(argument) if abs(argument) <= 1 << 53 else math.nan
        case float():
            number = argument
        case ("float", text):
            number = float.fromhex(text)
            number = ctypes.c_float(number).value if dtype == "float32" else number
        case ("bool", text):
            number = float(text == "True")
        case _:
            return None
    return number if holds(dtype, number) else None


def number_filled(call: Call) -> float | None:
    """The number that all elements of the result of a call of FILLS are; None where its dtype does not have it, or a
    size depends on data, which the call's arguments tell."""
    if not call.value.is_closed:
        return None
    told = FILLS[call.op]
    return number_in(dict(call.args)[told] if isinstance(told, str) else told, call.value.dtype)


def inverse(argument: Any, dtype: str) -> float | None:
    """The number by which a product is the division by an argument: a power of 2 that the dtype has, as its inverse."""
    number = number_in(argument, dtype)
    return None if number is None or abs(math.frexp(number)[0]) != 0.5 else 1 / number


IN_PLACE = {
    row.overload(end): of
    for row in ROWS.values()
    if row.in_place_of
    for of, name in EXACT.items()
    if of.rpartition(".")[0] == row.in_place_of and (end := of.rpartition(".")[2])
}
"""Operators that leave in `self` what another gives, told by its name where it takes tensors of real or whole numbers
alone: each element is converted and rounded once, so it does not matter where the result lies."""

COPY_INTO = "aten.copy_.default"
"""An operator that leaves in `self` the values of `src`, where both have one dtype and shape."""

COMMUTING = {name for name in EXACT.values() if named(name).commutes}

CAST = "aten._to_copy.default"
"""A cast from one dtype of FLOATS to another is exact; from or to an integer it is opaque, and within a dtype a copy.
"""

CONVERTS = "prims.convert_element_type.default"
"""The cast as decompositions write it, of an argument `a`: it is written down as CAST."""

COPIES = {row.overload("default"): row.copies for row in ROWS.values() if row.copies}
"""Operators whose result, where its dtype is the same, has the values of the argument named, in memory of its own."""

WAITS = {f"{row.name}.default": row.wait.argument for row in ROWS.values() if row.wait and row.allowed}
"""Operators before which the result of a launch must not be read, nor what it reads be written."""

FILLS = {row.overload(row.fills[0]): row.fills[1] for row in ROWS.values() if row.fills}
"""Operators whose result holds one number everywhere: the number, or the argument that gives it."""

CARRIES = overloads(lambda row: row.carries)
"""Operators that copy elements to other places, or put zeros there: values decide, and no layout."""

FLIP = "aten.flip.default"
PAD = "aten.constant_pad_nd.default"
"""An operator that puts a number around what it reads."""

DIVISIONS = {ROWS["aten.div"].overload(end) for end in ("Tensor", "Scalar")}
"""Operators that are products where the divisor is a power of 2 of which the dtype has both it and its inverse."""

POWER = ROWS["aten.pow"].overload("Tensor_Scalar")
"""An operator that is a product of what it reads with itself where the exponent is 2 and the dtype real."""

_COUNTED = {row.overload("default"): f"{row.counts_as}.default" for row in ROWS.values() if row.counts_as}

FUSED = {op: of for op, of in _COUNTED.items() if op.startswith("aten._fused_")}
"""Operators that update parameters and their state, lists of tensors, and the one as which each is written down."""

UPDATES = frozenset(FUSED.values())
"""These, one parameter at a time. Only tensors in rows are admitted, so that no layout is left to decide; nor does it
count where in a line of memory one begins: the kernel takes the elements in order, as many at a time from the first on,
by loads that need no alignment (aten/src/ATen/native/cpu/FusedAdamKernel.cpp), and a test tries each place."""

BATCH_NORMS = {op: of for op, of in _COUNTED.items() if op not in FUSED}
"""Operators that write STATISTICS in training, as schemas say of some, and the one as which they are written down."""

PYTHON = "python."
"""What the names of operators begin with that compute a real number of others, as Python does: a tensor of one float64
stands for it. `python.float` is a number read from a tensor."""

STATISTICS = ("running_mean", "running_var")

JOINS = _by_default(lambda row: row.joins)

NUMBER = "number"
"""What a graph's output is called that is a size."""

VIEW = "view"
"""What any operator is called whose results lie in the memory of what it reads, where no size depends on data."""

RESHAPES = _by_default(lambda row: row.reshapes)
"""Operators that show all elements of `self` in their order, be it in its memory or in their own."""

SPLIT = "aten.split_with_sizes_copy.default"
"""An operator that shows parts of `self` in memory of their own. Any other view lies in the memory of what it shows."""

REFUSED = _by_default(lambda row: row.reads_memory)
"""Operators that read what lies in memory, not what a tensor's values are; where layouts tell which elements these
show, they are written down as views. And one whose result lies in the memory of what it reads, which neither its schema
nor fake values tell."""

SHARES_UNTOLD = _by_default(lambda row: row.returns and row.name.startswith("aten."))
"""Operators whose results lie in the memory of what they read, though their fakes do not: `export` knows that."""

CHECKS = overloads(lambda row: row.checks)
"""Operators that raise or do not, and do nothing else."""

SIZES = overloads(lambda row: row.measures)
"""Operators that read a number off a tensor's layout."""

ARITHMETIC = {
    *(getattr(operator, name) for name in ("add", "sub", "mul", "neg", "floordiv", "truediv", "mod", "pow")),
    *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_")),
    *(torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not, torch.sym_sum),
    *(max, min, abs, int, float, math.ceil, math.floor, math.trunc),
}
"""Functions that compute numbers of the numbers that they are handed, and do nothing else.

What any other gives now, the time or the number of threads, it need not give in another step.
"""


DRAWS = _by_default(lambda row: row.draws_untold)
"""Operators that draw random numbers and are not tagged as such."""

UNINITIALIZED = names_of_uninitialized(Uninitialized.WHOLE)
"""Operators, without namespace and overload, whose result is whatever memory held."""

GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
FAMILIES = COMMUNICATES
"""Namespaces of operators that communicate."""
COLLECTIVES = _by_default(lambda row: row.is_understood and row.launch)
"""Collectives that are understood; any other is refused."""

HIGHER_ORDER = {row.name for row in ROWS.values() if row.is_understood and not row.launch}
"""Higher-order operators that are pure functions of what they are handed; any other is refused."""
