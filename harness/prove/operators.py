"""What a proof knows of operators. Any other is opaque: equal only of equal, equally laid out tensors."""

from __future__ import annotations

import math
import operator

import torch

from bitproof.harness.operators import ROWS, Uninitialized, names_of_uninitialized

FLOATS = {"float64", "float32", "bfloat16", "float16"}
"""Real dtypes in which one operation is one rounding."""

EXACT = {
    "aten.add.Tensor": "add",
    "aten.sub.Tensor": "sub",
    "aten.mul.Tensor": "mul",
    "aten.neg.default": "neg",
}
"""Operators that are exact where all operands and the result are tensors of one dtype of FLOATS, and alpha is 1.

A number as an operand is kept in a wider dtype than the tensor's, so `x + 0.1` is left opaque; division is by a
reciprocal on some devices, powers and roots have vector bodies that differ from their tails, max and min tell no +0
from -0 in one order.
"""

IN_PLACE = {
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten.sub_.Tensor": "aten.sub.Tensor",
    "aten.mul_.Tensor": "aten.mul.Tensor",
    "aten.neg_.default": "aten.neg.default",
}
"""Operators that leave in `self` what another gives, told by its name where it takes tensors of real or whole numbers
alone: each element is converted and rounded once, so it does not matter where the result lies."""

WHOLE = {"int64", "int32"}

COPY_INTO = "aten.copy_.default"
"""An operator that leaves in `self` the values of `src`, where both have one dtype and shape."""

COMMUTING = {"add", "mul"}

CAST = "aten._to_copy.default"
"""A cast from one dtype of FLOATS to another is exact; from or to an integer it is opaque, and within a dtype a copy.
"""

COPIES = {
    CAST: "self",
    "aten.clone.default": "self",
    "aten.contiguous.default": "self",
    "bitproof.offload.default": "x",
    "bitproof.reload.default": "host",
}
"""Operators whose result, where its dtype is the same, has the values of the argument named, in memory of its own."""

WAITS = {f"{row.name}.default": row.wait.argument for row in ROWS.values() if row.wait}
"""Operators before which the result of a launch must not be read, nor what it reads be written."""

JOINS = ("aten.cat.default", "aten.stack.default")

VIEW = "view"
"""What any operator is called whose results lie in the memory of what it reads, where no size depends on data."""

RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
"""Operators that show all elements of `self` in their order, be it in its memory or in their own."""

SPLIT = "aten.split_with_sizes_copy.default"
"""An operator that shows parts of `self` in memory of their own. Any other view lies in the memory of what it shows."""

REFUSED = {
    "aten.as_strided.default",
    "aten.as_strided_.default",
    "aten.as_strided_copy.default",
    "aten.as_strided_scatter.default",
    "aten._reshape_alias.default",
    "aten.lift.default",
}
"""Operators that read what lies in memory, not what a tensor's values are; where layouts tell which elements these
show, they are written down as views. And one whose result lies in the memory of what it reads, which neither its schema
nor fake values tell."""

SHARES_UNTOLD = {"aten._unsafe_view.default"}
"""Operators whose results lie in the memory of what they read, though their fakes do not: `export` knows that."""

CHECKS = {
    *("aten._assert_async.default", "aten._assert_async.msg", "aten._assert_scalar.default"),
    *("aten._assert_tensor_metadata.default", "aten._linalg_check_errors.default"),
    *("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"),
    *("aten._functional_assert_async.msg", "aten._functional_assert_scalar.default"),
    *("aten._functional_sym_constrain_range.default", "aten._functional_sym_constrain_range_for_size.default"),
}
"""Operators that raise or do not, and do nothing else. That an operator gives nothing, and says that it writes nothing,
does not make it one: `manual_seed` is such."""

SIZES = {"aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default", "aten.sym_storage_offset.default"}
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


DRAWS = {
    *("prims.inductor_random.default", "prims.inductor_randint.default"),
    *("aten._no_grad_normal_.default", "aten._no_grad_uniform_.default"),
}
"""Operators that draw random numbers and are not tagged as such."""

UNINITIALIZED = names_of_uninitialized(Uninitialized.WHOLE)
"""Operators, without namespace and overload, whose result is whatever memory held."""

GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
FAMILIES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")
"""Namespaces of operators that communicate."""
COLLECTIVES = {
    GATHER,
    REDUCE,
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_to_all_single.default",
}
"""Collectives that are understood; any other is refused."""

HIGHER_ORDER = {"higher_order.flex_attention", "higher_order.flex_attention_backward"}
"""Higher-order operators that are pure functions of what they are handed; any other is refused."""
