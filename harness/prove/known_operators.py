"""What a proof knows of operators. Any other is opaque: equal only of equal, equally laid out tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch

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


def _name(row: Operator) -> str:
    return row.name.partition(".")[2]


def _by_default(holds: Callable[[Operator], object]) -> frozenset[str]:
    """The full names, with the overload `default`, of operators of which something holds."""
    return frozenset(row.overload("default") for row in ROWS.values() if holds(row))


EXACT = {row.overload(row.exact): _name(row) for row in ROWS.values() if row.exact}
"""Operators that are exact where all operands and the result are tensors of one dtype of FLOATS, and alpha is 1.

A number as an operand is kept in a wider dtype than the tensor's, so `x + 0.1` is left opaque; division is by a
reciprocal on some devices, powers and roots have vector bodies that differ from their tails, max and min tell no +0
from -0 in one order.
"""

IN_PLACE = {
    row.overload(end): ROWS[row.in_place_of].overload(end)
    for row in ROWS.values()
    if row.in_place_of and (end := ROWS[row.in_place_of].exact)
}
"""Operators that leave in `self` what another gives, told by its name where it takes tensors of real or whole numbers
alone: each element is converted and rounded once, so it does not matter where the result lies."""

WHOLE = {"int64", "int32"}

COPY_INTO = "aten.copy_.default"
"""An operator that leaves in `self` the values of `src`, where both have one dtype and shape."""

COMMUTING = {name for name in EXACT.values() if named(name).commutes}

CAST = "aten._to_copy.default"
"""A cast from one dtype of FLOATS to another is exact; from or to an integer it is opaque, and within a dtype a copy.
"""

COPIES = {row.overload("default"): row.copies for row in ROWS.values() if row.copies}
"""Operators whose result, where its dtype is the same, has the values of the argument named, in memory of its own."""

WAITS = {f"{row.name}.default": row.wait.argument for row in ROWS.values() if row.wait and row.allowed}
"""Operators before which the result of a launch must not be read, nor what it reads be written."""

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
