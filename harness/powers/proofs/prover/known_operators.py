"""Operators whose semantics the prover knows.

All other operators are opaque: their results are only proved equal if the operands and their layouts are equal.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

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
from bitproof.harness.powers.proofs.prover.proof_data import Call

FLOATS = {"float64", "float32", "bfloat16", "float16"}
"""Real dtypes in which one operation is one rounding."""

WHOLE = {"int64", "int32"}


def _by_default(holds: Callable[[Operator], object]) -> frozenset[str]:
    return frozenset(row.overload("default") for row in ROWS.values() if holds(row))


EXACT = {
    row.overload(end): row.name.partition(".")[2]
    for row in ROWS.values()
    if row.exact
    # A row states an overload; `Tensor` stands for the overload with a number as well.
    for end in (("Tensor", "Scalar") if row.exact == "Tensor" else (row.exact,))
}
"""By full name, the short name of each operator that computes an element only from the elements at the same index.

A call counts as exact only if `is_exact` accepts its dtypes and it has no `alpha`. A number operand counts as a tensor
filled with it, if the dtype represents the number exactly.

Kernels keep any other number in a wider dtype than bfloat16 and float16, so `x + 0.1` is opaque there. Some devices
divide by a reciprocal, the vector bodies of powers and roots differ from their tails, and max and min do not order +0
and -0: these operators are not exact.
"""


def is_exact(name: str, own: str, operands: Sequence[str]) -> bool:
    """Return whether an operator, by its short name, is exact for operands of these dtypes and a result of dtype `own`.

    `own` is bool for comparisons, otherwise the operands' dtype.
    """
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
# Numbers are floats here, so int64 has only their 53 bits.
_RANGES |= {"int64": (53, 0, 54), "int32": (31, 0, 31), "bool": (1, 0, 1)}
"""For each dtype: precision in bits, exponent of the lowest bit, exponent of the first power of 2 that is too large."""


def holds(dtype: str, number: float) -> bool:
    """Return whether a dtype represents a number exactly.

    False for 0.1 and 2**24 + 1 in float32, and for -0.0 in int64. False for all numbers of more than 53 bits.
    """
    is_negative = math.copysign(1.0, number) < 0 and (dtype == "bool" or (number == 0 and dtype not in FLOATS))
    if dtype not in _RANGES or not math.isfinite(number) or is_negative:
        return False
    digits, least, beyond = _RANGES[dtype]
    numerator, denominator = number.as_integer_ratio()
    # The number is an odd integer times 2**lowest, and less than 2**above: 6.5 is 13 * 2**-1, and less than 2**3.
    lowest = (numerator & -numerator).bit_length() - denominator.bit_length()
    above = math.frexp(number)[1]
    return number == 0 or (above - lowest <= digits and lowest >= least and above <= beyond)


def number_in(argument: Any, dtype: str) -> float | None:
    """Return the number that a kernel uses for an argument, if it computes on tensors of `dtype`.

    None if the argument is no number or an integer beyond 2**53, or if the dtype cannot represent it.
    """
    match argument:
        case int():
            number = float(argument) if abs(argument) <= 1 << 53 else math.nan
        case float():
            number = argument
        case ("float", text):
            number = float.fromhex(text)
            # Kernels keep a real number in at least 32 bits; for a float32 tensor they round it once, to float32.
            number = ctypes.c_float(number).value if dtype == "float32" else number
        case ("bool", text):
            number = float(text == "True")
        case _:
            return None
    return number if holds(dtype, number) else None


def number_filled(call: Call) -> float | None:
    """Return the number that fills the result of a call of FILLS, such as 0 for `zeros`.

    None if the dtype cannot represent the number, or if a size of the result depends on data.
    """
    # The call's arguments determine a data-dependent size, so the number cannot replace them.
    if not call.value.is_closed:
        return None
    filled = FILLS[call.op]
    return number_in(dict(call.args)[filled] if isinstance(filled, str) else filled, call.value.dtype)


def inverse(argument: Any, dtype: str) -> float | None:
    """Return the factor that replaces a division by a power of 2, such as 0.25 for a division by 4.

    None for any other divisor, and if the dtype cannot represent the divisor.
    """
    number = number_in(argument, dtype)
    return None if number is None or abs(math.frexp(number)[0]) != 0.5 else 1 / number


IN_PLACE = {
    row.overload(end): of
    for row in ROWS.values()
    if row.in_place_of
    for of, name in EXACT.items()
    if of.rpartition(".")[0] == row.in_place_of and (end := of.rpartition(".")[2])
}
"""By full name, the operator of EXACT whose result an in-place operator writes into `self`: `aten.add_` has `aten.add`.

Calls on tensors of floats or integers alone are compared under that operator's name: each element is converted and
rounded once, wherever the result is stored.
"""

COPY_INTO = "aten.copy_.default"
"""Writes the values of `src` into `self`, if both have the same dtype and shape."""

COMMUTING = {name for name in EXACT.values() if named(name).commutes}

CHOICE = "aten.where.self"
NUMBER_TENSOR = "aten.scalar_tensor.default"

MASKED = {f"aten.{name}.{end}" for name in ("masked_fill", "masked_fill_") for end in ("Scalar", "Tensor")}
"""Operators recorded as CHOICE: they convert the number to the tensor's dtype, and take it or the element."""

DIVIDES = {"aten.div_.Tensor": "aten.div.Tensor"}
"""The in-place division, with the division as which it is recorded: on row-major CPU tensors both round once."""

CAST = "aten._to_copy.default"
"""The cast. It is exact between two dtypes of FLOATS, opaque from or to an integer, and a copy to the same dtype."""

LIFTS, CLONE = "aten.lift_fresh_copy.default", "aten.clone.default"
"""Copies. `torch.tensor(1.0)` is traced as LIFTS of a constant, and recorded as CLONE."""

CONVERTS = "prims.convert_element_type.default"
"""The cast in decompositions, with an argument `a`; recorded as CAST."""

ITSELF = frozenset({"aten.alias.default", "aten.detach.default"})
"""Operators that return their input. How often they occur varies between traces of the same code.

For example, autograd detaches a tensor if something else holds it, such as a sampling profiler that holds frames.
"""

COPIES = {row.overload("default"): row.copies for row in ROWS.values() if row.copies}
"""By full name, the argument that an operator copies to new memory. With another dtype it casts."""

WAITS = {f"{row.name}.default": row.wait.argument for row in ROWS.values() if row.wait and row.allowed}
"""Operators that wait, with the argument that is the awaited value. Before the wait, no call may read the launch's
result or write its inputs."""

FILLS = {row.overload(row.fills[0]): row.fills[1] for row in ROWS.values() if row.fills}
"""Operators that fill their result with a number, with that number, or with the name of the argument that has it."""

OVERWRITES = overloads(lambda row: row.overwrites)
"""Operators that overwrite every element of `self` with a random number, and read none of them."""

ZEROS_INTO = ROWS["aten.zero_"].overload("default")

CARRIES = overloads(lambda row: row.carries)
"""Operators that copy elements to other indices, or write zeros: the result depends on values, not on layouts."""

FLIP = "aten.flip.default"
PAD = "aten.constant_pad_nd.default"
"""Pads its input with a number."""

DIVISIONS = {ROWS["aten.div"].overload(end) for end in ("Tensor", "Scalar")}
"""Operators that equal a product if the divisor is a power of 2, and the dtype has the divisor and its inverse."""

POWER = ROWS["aten.pow"].overload("Tensor_Scalar")
"""Equals the product of its input with itself if the exponent is 2 and the dtype a float."""

_COUNTED = {row.overload("default"): f"{row.counts_as}.default" for row in ROWS.values() if row.counts_as}

FUSED = {op: of for op, of in _COUNTED.items() if op.startswith("aten._fused_")}
"""Optimizer kernels, which update lists of parameters and their state, with the operator as which a proof records one
parameter's update."""

UPDATES = frozenset(FUSED.values())
"""The recorded operators of FUSED. Layouts do not matter, since only row-major tensors are admitted.

Alignment does not matter either: the kernel reads vectors of elements in order from the first on, with unaligned loads
(aten/src/ATen/native/cpu/FusedAdamKernel.cpp), and a test tries each alignment.
"""

BATCH_NORMS = {op: of for op, of in _COUNTED.items() if op not in FUSED}
"""Batch norms, with the operator as which each is recorded. In training they write STATISTICS, although only some of
their schemas say so."""

PYTHON = "python."
"""The name prefix of Python operators on numbers. The result is recorded as a float64 tensor without dims.

`python.float` reads a number from a tensor.
"""

STATISTICS = ("running_mean", "running_var")
"""The arguments of a batch norm that it writes in training."""

JOINS = _by_default(lambda row: row.joins)

NUMBER = "number"
"""The recorded operator of a graph's output that is a size."""

VIEW = "view"
"""The recorded name of any operator whose results share their input's memory, if no size depends on data."""

RESHAPES = _by_default(lambda row: row.reshapes)
"""Operators that return all elements of `self` in order, in its memory or in a copy."""

SPLIT = "aten.split_with_sizes_copy.default"
"""An operator that copies parts of `self` into new memory. Any other view shares its input's memory."""

REFUSED = _by_default(lambda row: row.reads_memory)
"""Operators that read memory instead of a tensor's values, such as `as_strided`; and `lift`, whose result shares its
input's memory although neither its schema nor fake values state it.

If layouts determine the elements of such a call, it is recorded as VIEW, and so not refused.
"""

SHARES_UNTOLD = _by_default(lambda row: row.returns and row.name.startswith("aten."))
"""Operators whose results share their input's memory although their fakes have their own. `export` handles them."""

SPLITS = {
    torch.ops.aten.unsafe_split.Tensor: torch.ops.aten.split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default: torch.ops.aten.split_with_sizes.default,
}
"""Unsafe splits, with the ordinary splits as which they are recorded. Both return views of parts of the input.

An unsafe split promises autograd that no call writes to the parts, so its schema and fake do not state this.
"""

CHECKS = overloads(lambda row: row.checks)
"""Operators whose only effect is to raise an error."""

SAME_SHAPE = {f"aten.{name}_backward_data.default": ("grad_output", "output") for name in ("_softmax", "_log_softmax")}
SAME_SHAPE |= {f"aten.binary_cross_entropy{end}.default": ("self", "target") for end in ("", "_backward")}
"""Operators that do not check shapes, with the arguments that must have equal shapes."""

SAME_BATCH = {
    f"aten.{name}{dims}d_backward.default": dims
    for name in ("_adaptive_avg_pool", "avg_pool", "reflection_pad", "replication_pad")
    for dims in (1, 2, 3)
}
"""Operators that do not check whether their tensors have equal shapes except in the last dims, and the number of these
dims: 2 for `avg_pool2d_backward`."""

LIES_BY_SHAPE = {"aten._scaled_dot_product_flash_attention_for_cpu_backward.default"}
"""Operators whose tensors may have several real dtypes and different layouts.

Only the row-major `logsumexp` of this operator has another dtype, and a scan tried each pair of layouts.
"""

CHOOSES = {
    "aten._grouped_mm.default": ("offs",),
    "aten._unsafe_index.Tensor": ("indices",),
    "aten._unsafe_masked_index.default": ("mask", "indices"),
    "aten._unsafe_masked_index_put_accumulate.default": ("mask", "indices"),
    "aten.embedding.default": ("indices",),
    "aten.embedding_dense_backward.default": ("indices",),
    "aten.gather.default": ("index",),
    "aten.index.Tensor": ("indices",),
    "aten.index_add.default": ("index",),
    "aten.index_copy.default": ("index",),
    "aten.index_fill.int_Scalar": ("index",),
    "aten.index_put.default": ("indices",),
    "aten.index_select.default": ("index",),
    "aten.masked_fill.Scalar": ("mask",),
    "aten.masked_fill.Tensor": ("mask",),
    "aten.masked_scatter.default": ("mask",),
    "aten.max_pool2d_with_indices_backward.default": ("indices",),
    "aten.native_dropout_backward.default": ("mask",),
    "aten.nll_loss2d_backward.default": ("target",),
    "aten.nll_loss_backward.default": ("target",),
    "aten.nll_loss_forward.default": ("target",),
    "aten.scatter.src": ("index",),
    "aten.scatter.value": ("index",),
    "aten.scatter_add.default": ("index",),
    "aten.take.default": ("index",),
    "aten.where.ScalarOther": ("condition",),
    "aten.where.ScalarSelf": ("condition",),
    "aten.where.self": ("condition",),
}
"""Operators with their index, offset and mask arguments. The dtype of such an argument does not affect the others.

A test tries every layout of these arguments with every layout of the others.
"""

COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")

TAKES_NUMBERS_AS_TENSORS = {
    *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div", *COMPARES)),
    *("aten.where.self", "aten.maximum.default", "aten.minimum.default"),
}
"""Operators that may read a tensor without dims together with tensors of another dtype.

Such a tensor is promoted like a number. A test tries every pair of dtypes.
"""

TAKES_ANY_NUMBER = {
    *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")),
    *(f"aten.{name}.Scalar" for name in ("add", "sub", "mul", "div", "rsub", "fmod", "remainder", "fill")),
    *(f"aten.{name}.Scalar" for name in COMPARES),
    *(
        f"aten.{name}.default"
        for name in ("clamp", "clamp_min", "clamp_max", "full_like", "new_full", "constant_pad_nd")
    ),
    *("aten.masked_fill.Scalar", "aten.scatter.value"),
    *("aten.where.Scalar", "aten.where.ScalarOther", "aten.where.ScalarSelf"),
}
"""Operators that may read a number of a higher kind than their tensors, such as 0.5 with tensors of integers.

A test tries every dtype with every kind of number, in every layout.
"""

SIZES = overloads(lambda row: row.measures)
"""Operators that read a number from a tensor's layout."""

ARITHMETIC = {
    *(getattr(operator, name) for name in ("add", "sub", "mul", "neg", "floordiv", "truediv", "mod", "pow")),
    *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_")),
    *(torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not, torch.sym_sum),
    *(max, min, abs, int, float, math.ceil, math.floor, math.trunc),
}
"""Pure functions from numbers to numbers.

Any other function, such as the time or the number of threads, may return another value in another step.
"""


DRAWS = _by_default(lambda row: row.draws_untold)
"""Operators that draw random numbers without torch's tag for it."""

UNINITIALIZED = names_of_uninitialized(Uninitialized.WHOLE)
"""Operators, without namespace and overload, that return uninitialized memory."""

UNWRITTEN = ("empty", "new_empty", "_empty", "_make_dep_token", "inductor_rand_eager_offset")
"""Prefixes of the names of all operators that return uninitialized memory, in torch and by convention elsewhere."""

GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
FAMILIES = COMMUNICATES
"""Namespaces of operators that communicate."""
COLLECTIVES = _by_default(lambda row: row.is_understood and row.launch)
"""The supported collectives; any other is refused."""

HIGHER_ORDER = {row.name for row in ROWS.values() if row.is_understood and not row.launch}
"""Higher-order operators that are pure functions of their arguments; any other is refused."""


def is_unwritten(op: str) -> bool:
    """Return whether an operator, of any namespace and overload, returns uninitialized memory."""
    return op.split(".")[-2:][0].startswith(UNWRITTEN)
