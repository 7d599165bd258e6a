"""Operators that compute nothing: they join values, take them apart, or make constants."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.operators import RowFlow, named, names

PACKING = names(lambda row: row.packs)
"""Operators that join values, such as `cat`, or return parts of them, such as `split`."""

CONSTANTS = names(lambda row: row.is_constant)
"""Operators whose values do not depend on their inputs' values."""

GATHERS = names(lambda row: row.rows is RowFlow.ALL_GATHER)
"""Collectives that join one value of each rank."""

OVER_LISTS = ("_foreach_", "_fused_")
"""Prefixes of operators that compute each entry of their lists independently; logs have a call for each entry."""


def keeps_order(call: Call) -> bool:
    """Whether a call is a view of all of its input's elements in their order. False for views with another dtype."""
    return call.operator != "view.dtype" and named(name_of(call)).keeps_order


def name_of(call: Call) -> str:
    """Return a call's operator without its overload."""
    return call.operator.partition(".")[0]
