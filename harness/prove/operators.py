"""What a proof knows of operators. Any other is opaque: equal only of equal, equally laid out tensors."""

from __future__ import annotations

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

WAITS = {
    "_c10d_functional.wait_tensor.default": "tensor",
    "bitproof.wait_offload.default": "host",
    "bitproof.wait_reload.default": "x",
}
"""Operators before which the result of a launch must not be read, nor what it reads be written."""

LAUNCHES = {"bitproof.offload.default": "x", "bitproof.reload.default": "host"}
"""What must be waited for, besides collectives, and what it reads."""

JOINS = ("aten.cat.default", "aten.stack.default")

VIEW = "view"
"""What any operator is called whose results lie in the memory of what it reads, where no size depends on data."""

RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
"""Operators that show all elements of `self` in their order, be it in its memory or in their own."""

SPLIT = "aten.split_with_sizes_copy.default"
"""An operator that shows parts of `self` in memory of their own. Any other view lies in the memory of what it shows."""

REFUSED = {
    "aten.as_strided.default",
    "aten.as_strided_copy.default",
    "aten.as_strided_scatter.default",
}
"""Operators that read what lies in memory, not what a tensor's values are."""

UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators, without overload, whose result is whatever memory held."""

GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
COLLECTIVES = {
    GATHER,
    REDUCE,
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_to_all_single.default",
}
"""Collectives that are understood; any other is refused."""

HIGHER_ORDER = {"higher_order.flex_attention", "higher_order.flex_attention_backward"}
"""Higher-order operators that are pure functions of what they are handed; any other is refused."""
