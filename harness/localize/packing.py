"""Operators that compute nothing: they put values together, take them apart, or make them of nothing."""

from __future__ import annotations

from bitproof.harness.localize.calls import Call

_ORDER_KEEPING = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze"}

PACKING = _ORDER_KEEPING | {
    "cat",
    "stack",
    "constant_pad_nd",
    "clone",
    "split",
    "split_with_sizes",
    "split_with_sizes_copy",
}
"""Operators that put values together, or give parts of them."""

CONSTANTS = {"zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "full", "full_like", "fill_"}
"""Operators of which no input decides a value."""


def keeps_order(call: Call) -> bool:
    """Whether a view has its input's elements in their order; one of another dtype has other elements."""
    return call.operator != "view.dtype" and name_of(call) in _ORDER_KEEPING


def name_of(call: Call) -> str:
    """A call's operator without its overload."""
    return call.operator.partition(".")[0]
