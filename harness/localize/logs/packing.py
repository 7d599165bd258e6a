"""Operators that compute nothing: they put values together, take them apart, or make them of nothing."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.operators import named, names

PACKING = names(lambda row: row.packs)
"""Operators that put values together, or give parts of them."""

CONSTANTS = names(lambda row: row.is_constant)
"""Operators whose values do not depend on their inputs' values."""


OVER_LISTS = ("_foreach_", "_fused_")
"""How the names of operators begin that compute each entry of their lists by itself; logs have a call for each."""


def keeps_order(call: Call) -> bool:
    """Whether a view has its input's elements in their order; one of another dtype has other elements."""
    return call.operator != "view.dtype" and named(name_of(call)).keeps_order


def name_of(call: Call) -> str:
    """A call's operator without its overload."""
    return call.operator.partition(".")[0]
