"""Lists of the operators that the prover knows, by what they do.

The prover knows nothing about other operators. Two results of such an operator are only proved equal if the operands
and their layouts are equal.
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
"""The dtypes in which an exact operator rounds once."""

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
"""Each operator that may be exact, by full name, with its short name: "aten.add.Tensor" -> "add".

An operator is exact if each element of its result depends only on the elements at the same index, and is rounded once.
A call counts as exact only if `is_exact` accepts its dtypes and it has no `alpha`. A number operand counts as a tensor
filled with it, if the dtype represents the number exactly.

These calls are not exact:

- `x + 0.1` in bfloat16 or float16, because kernels keep 0.1 in a wider dtype;
- division, because some devices multiply by the reciprocal;
- powers and roots, because vectorized code and the code for the last elements differ;
- max and min, because they do not order +0 and -0.
"""


def is_exact(name: str, own: str, operands: Sequence[str]) -> bool:
    """Return whether the operator with this short name is exact for these dtypes.

    - `own`: the dtype of the result. For comparisons it is bool, otherwise the dtype of the operands.
    - `operands`: the dtypes of the operands.
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
"""dtype -> (precision in bits, exponent of the lowest bit, exponent of the first power of 2 that is too large)."""


def holds(dtype: str, number: float) -> bool:
    """Return whether a dtype represents a number exactly.

    False for 0.1 and 2**24 + 1 in float32, for -0.0 in int64, and for a number with more than 53 bits.
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
    """Return the number that a kernel computes with if it gets this argument together with tensors of `dtype`.

    For example, 0.5 for ("float", "0x1p-1"). None if the argument is not a number, is an integer beyond 2**53, or
    cannot be represented by the dtype.
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
    """Return the number that fills the result of a call in FILLS: 0 for `zeros`.

    None if the dtype cannot represent the number, or if a size of the result depends on data.
    """
    # The call's arguments determine a data-dependent size, so the number cannot replace them.
    if not call.value.is_closed:
        return None
    filled = FILLS[call.op]
    return number_in(dict(call.args)[filled] if isinstance(filled, str) else filled, call.value.dtype)


def inverse(argument: Any, dtype: str) -> float | None:
    """Return the factor that replaces a division by a power of 2: 0.25 for a division by 4.

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
"""Maps an in-place operator to the operator of EXACT whose result it writes into `self`: `aten.add_` to `aten.add`.

If all tensors are floats or integers, the call is compared under the mapped name. This is right because each element is
converted and rounded once, wherever the result is stored.
"""

COPY_INTO = "aten.copy_.default"
"""Copies the values of `src` into `self`."""

COMMUTING = {name for name in EXACT.values() if named(name).commutes}

CHOICE = "aten.where.self"
NUMBER_TENSOR = "aten.scalar_tensor.default"

MASKED = {f"aten.{name}.{end}" for name in ("masked_fill", "masked_fill_") for end in ("Scalar", "Tensor")}
"""Masked fills, which are recorded as CHOICE: `masked_fill(x, m, 0)` becomes `where(m, 0, x)`.

Both convert the number to the tensor's dtype.
"""

DIVIDES = {"aten.div_.Tensor": "aten.div.Tensor"}
"""The in-place division, which is recorded as a division and a copy: on row-major CPU tensors both round once."""

CAST = "aten._to_copy.default"
"""A cast. It is exact between two dtypes of FLOATS, and a copy if the dtype is the same.

No rule rewrites a cast from or to integers.
"""

LIFTS, CLONE = "aten.lift_fresh_copy.default", "aten.clone.default"
"""Copies. A trace of `torch.tensor(1.0)` has a call of LIFTS on a constant, which is recorded as CLONE."""

CONVERTS = "prims.convert_element_type.default"
"""The cast in decompositions, which is recorded as CAST. Its input is named `a`."""

ITSELF = frozenset({"aten.alias.default", "aten.detach.default"})
"""Operators that return their input. They are not recorded, since their number varies between traces of the same code.

For example, autograd detaches a tensor if something else holds the tensor, such as a sampling profiler that keeps
frames alive.
"""

COPIES = {row.overload("default"): row.copies for row in ROWS.values() if row.copies}
"""Maps an operator that copies a tensor to new memory to the name of the copied argument. With another dtype, it casts.
"""

WAITS = {f"{row.name}.default": row.wait.argument for row in ROWS.values() if row.wait and row.allowed}
"""Maps an operator that waits for a collective to the name of the argument that it waits for.

Before the wait, no call may read the collective's result or write its inputs.
"""

FILLS = {row.overload(row.fills[0]): row.fills[1] for row in ROWS.values() if row.fills}
"""Maps an operator that fills its result with a number to this number, or to the name of the argument with the number.
"""

OVERWRITES = overloads(lambda row: row.overwrites)
"""Operators that overwrite every element of `self` with a random number, and read no element."""

ZEROS_INTO = ROWS["aten.zero_"].overload("default")

CARRIES = overloads(lambda row: row.carries)
"""Operators that copy elements to other indices or write zeros. The result depends on values, not on layouts."""

FLIP = "aten.flip.default"
PAD = "aten.constant_pad_nd.default"

DIVISIONS = {ROWS["aten.div"].overload(end) for end in ("Tensor", "Scalar")}
"""Division, which is recorded as a product if the divisor is a power of 2, and the dtype represents it and its inverse.
"""

POWER = ROWS["aten.pow"].overload("Tensor_Scalar")
"""A power, which is recorded as the product of its input with itself if the exponent is 2 and the dtype is in FLOATS.
"""

_COUNTED = {row.overload("default"): f"{row.counts_as}.default" for row in ROWS.values() if row.counts_as}

FUSED = {op: of for op, of in _COUNTED.items() if op.startswith("aten._fused_")}
"""Maps an optimizer's kernel for lists of parameters to the operator under which each parameter's update is recorded.
"""

UPDATES = frozenset(FUSED.values())
"""The operators under which updates of parameters are recorded (the values of FUSED).

Their layouts do not matter, because all tensors must be row-major. Alignment does not matter either. The kernel reads
vectors of elements in order from the first element on, with unaligned loads
(aten/src/ATen/native/cpu/FusedAdamKernel.cpp). A test tries each alignment.
"""

BATCH_NORMS = {op: of for op, of in _COUNTED.items() if op not in FUSED}
"""Maps a batch norm to the operator under which it is recorded.

In training they write STATISTICS, although only some of their schemas state this.
"""

PYTHON = "python."
"""The name prefix of Python operators on numbers, such as `python.mul`.

The result is recorded as a float64 scalar tensor. `python.float` reads a number from a tensor.
"""

STATISTICS = ("running_mean", "running_var")
"""The arguments that a batch norm writes in training."""

JOINS = _by_default(lambda row: row.joins)

NUMBER = "number"
"""The operator under which an output that is a size is recorded."""

VIEW = "view"
"""The operator under which a view is recorded, whatever operator returned the view.

A view with a data-dependent size keeps its own operator.
"""

RESHAPES = _by_default(lambda row: row.reshapes)
"""Operators that return all elements of `self` in order. The result is a view if possible, otherwise a copy."""

SPLIT = "aten.split_with_sizes_copy.default"
"""A split that copies each part into new memory. Other splits return views."""

REFUSED = _by_default(lambda row: row.reads_memory)
"""Operators that no proof admits. They read memory instead of a tensor's values, such as `as_strided`.

`lift` is among them: its result shares the input's memory, although neither its schema nor its fake value states this.
A call whose elements follow from layouts is recorded as VIEW, and so not refused.
"""

SHARES_UNSTATED = _by_default(lambda row: row.returns and row.name.startswith("aten."))
"""Operators whose results share the memory of the input, although their fake results have their own.

`export` corrects it.
"""

SPLITS = {
    torch.ops.aten.unsafe_split.Tensor: torch.ops.aten.split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default: torch.ops.aten.split_with_sizes.default,
}
"""Maps an unsafe split to the ordinary split as which it is recorded. Both return views of parts of the input.

An unsafe split promises autograd that no call writes to the parts. So its schema and fake results do not state the
shared memory.
"""

CHECKS = overloads(lambda row: row.checks)
"""Operators whose only effect is to raise an error."""

SAME_SHAPE = {f"aten.{name}_backward_data.default": ("grad_output", "output") for name in ("_softmax", "_log_softmax")}
SAME_SHAPE |= {f"aten.binary_cross_entropy{end}.default": ("self", "target") for end in ("", "_backward")}
"""Maps an operator that does not check shapes to its arguments that must have equal shapes."""

SAME_BATCH = {
    f"aten.{name}{dims}d_backward.default": dims
    for name in ("_adaptive_avg_pool", "avg_pool", "reflection_pad", "replication_pad")
    for dims in (1, 2, 3)
}
"""Maps an operator to a number of last dims: 2 for `avg_pool2d_backward`.

All tensors must have equal shapes except in these last dims, but the operator does not check this.
"""

MIXES_FLOATS_IN_ANY_LAYOUT = {"aten._scaled_dot_product_flash_attention_for_cpu_backward.default"}
"""Operators whose tensors may have several floating-point dtypes and different layouts.

A scan tried each pair of layouts. In this operator, only `logsumexp` has another dtype, and it is row-major.
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
"""Maps an operator to its arguments that are indices, offsets or masks.

The dtype of such an argument does not affect the dtype of the result. A test tries every layout of these arguments with
every layout of the others.
"""

COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")

TAKES_NUMBERS_AS_TENSORS = {
    *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div", *COMPARES)),
    *("aten.where.self", "aten.maximum.default", "aten.minimum.default"),
}
"""Operators that may get a scalar tensor together with tensors of another dtype.

torch promotes a scalar tensor like a number. A test tries every pair of dtypes.
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
"""Operators that may get a number of a higher kind than their tensors, such as 0.5 with integer tensors.

A test tries every dtype with every kind of number, in every layout.
"""

SIZES = overloads(lambda row: row.measures)
"""Operators that return a number from a tensor's layout, such as a size or a stride."""

ARITHMETIC = {
    *(getattr(operator, name) for name in ("add", "sub", "mul", "neg", "floordiv", "truediv", "mod", "pow")),
    *(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_")),
    *(torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not, torch.sym_sum),
    *(max, min, abs, int, float, math.ceil, math.floor, math.trunc),
}
"""Python functions whose result depends only on their arguments, which are numbers.

Any other function may return another value in another step, as a clock does.
"""


DRAWS = _by_default(lambda row: row.draws_untagged)
"""Operators that draw random numbers although torch does not tag them as random."""

UNINITIALIZED = names_of_uninitialized(Uninitialized.WHOLE)
"""Operators that return uninitialized memory, by name without namespace and overload, such as `empty_like`."""

UNWRITTEN = ("empty", "new_empty", "_empty", "_make_dep_token", "inductor_rand_eager_offset")
"""Prefixes of the names of operators that return uninitialized memory.

All such operators of torch have one of these prefixes, and other libraries follow the convention.
"""

GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
FAMILIES = COMMUNICATES
"""Namespaces of operators that communicate."""
COLLECTIVES = _by_default(lambda row: row.is_understood and row.launch)
"""The supported collectives. Any other collective is refused."""

HIGHER_ORDER = {row.name for row in ROWS.values() if row.is_understood and not row.launch}
"""Higher-order operators whose result depends only on their arguments. Any other higher-order operator is refused."""


def is_unwritten(op: str) -> bool:
    """Return whether an operator returns uninitialized memory, whatever its namespace and overload."""
    return op.split(".")[-2:][0].startswith(UNWRITTEN)
