"""Rows that ranks divide among themselves, as in a mixture of experts. Each rank computes a range of the rows:

    cut        view (T, D) as (W, T / W, D)                    rows are in two dims
    selected   index_select along the first of the two dims    the rank's own range of rows
    copied     index_copy of the result, into zeros            all rows, with zeros for other ranks' rows
    joined     view as (T, D)                                  a summand
    summed     all_reduce of the summand                       all rows
               reduce_scatter of the summand, if it only divides `Rows.outer`

- Only the listed operators may read a value with rows in two dims.
- A rank's own range may be read like any rows.
- A summand has zeros for other ranks' rows, so it may only be moved and added.

The analysis assumes that the all_reduce runs over the ranks that divide the rows. A graph does not state that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import sympy

from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.mixing_rows import Rows, RuleCall, SharedRows, rank_of, sizes_of
from bitproof.harness.operators import named
from bitproof.harness.torch_sizes import exact

_ADDS = frozenset({"add"})


def cut(call: RuleCall, before: list[Any], after: list[Any], dim: int) -> Rows | None:
    """Return the `Rows` of a view that divides the rows into ranges, one for each rank; None for any other view.

    - `before`, `after`: the sizes of the view's input and result.
    - `dim`: the dim of the result that holds the rows of a range. The dim before it holds the ranges.
    """
    rows = call.rows[call.first]
    # The view holds all rows, so the division of a range's size is exact: n rows in 2 ranges are n / 2 each.
    size = exact(after[dim])
    is_cut = dim > 0 and after[dim - 1] * size == before[rows.dim]
    # Only the number of a range's rows is known.
    inner = sympy.sympify(size) / call.symbol
    is_even = inner.is_Rational and math.prod(after[: dim - 1]) == math.prod(before[: rows.dim])
    if rows.share or not is_cut or not is_even:
        return None
    share = SharedRows("cut", after[dim - 1], rows.outer, rows.inner)
    return replace(rows, dim=dim, outer=1, inner=inner, share=share)


def joined(rows: Rows, before: list[Any], after: list[Any]) -> Rows | None:
    """Return the `Rows` of a view that joins the two dims of divided rows into one; None for any other view.

    `before` and `after` are the sizes of the view's input and result.
    """
    share, dim = rows.share, rows.dim - 1
    assert share is not None
    whole = [*before[:dim], before[dim] * before[dim + 1], *before[dim + 2 :]]
    if list(map(exact, after)) != list(map(exact, whole)):
        return None
    # If no rank selected its range in between, the view back makes the rows whole again.
    left = None if share.index is None else replace(share, form="summand")
    return replace(rows, dim=dim, outer=share.outer, inner=share.inner, share=left)


def selected(call: RuleCall) -> Rows | None:
    """Return the rows of an `index_select`; None if it selects along the dim that holds them.

    If ranks divide the rows, it must select a single range.
    """
    rows, index = call.rows.get(call.first), call.given["index"]
    dim = call.given["dim"] % rank_of(call.first)
    if rows is None or call.of(index) or dim == rows.dim:
        return None
    if rows.share is None or not rows.share.form.startswith("cut"):
        return rows
    is_one = rows.share.form == "cut" and dim == rows.dim - 1 and sizes_of(call.node)[dim] == 1
    return replace(rows, share=replace(rows.share, form="one", index=index)) if is_one else None


def copied_into(call: RuleCall) -> Rows | None:
    """Return the rows of an `index_copy`; None unless all of these conditions hold:

    - It copies into zeros that no other call reads, since that call might write them.
    - The dim along which it copies does not hold the rows.
    - If it copies a rank's range, it uses the index that selected the range.
    """
    rows, index, target = call.of(call.given["source"]), call.given["index"], call.first
    dim = call.given["dim"] % rank_of(target)
    fills = named(operators.operator_name(target)).fills
    are_zeros = fills is not None and fills[1] == 0 and len(target.users) == 1
    if rows is None or call.of(index) or not are_zeros or dim == rows.dim:
        return None
    share = rows.share
    if share is None:
        return rows
    is_back = (
        share.form == "one" and dim == rows.dim - 1 and index is share.index and sizes_of(target)[dim] == share.count
    )
    return replace(rows, share=replace(share, form="cut summand")) if is_back else None


def is_summand(rows: Rows) -> bool:
    """Return whether a value has zeros for the rows of other ranks, so that only the sum over ranks has all rows."""
    return rows.share is not None and rows.share.form == "summand"


def whole(rows: Rows) -> Rows:
    """Return the `Rows` of the sum over ranks, if `rows` are those of a summand; otherwise return them unchanged."""
    return replace(rows, share=None) if is_summand(rows) else rows


def summed(call: RuleCall, rows: list[Rows]) -> Rows | None:
    """Return the `Rows` of a call that reads a summand; None if it may not read a summand.

    A summand has zeros for other ranks' rows. `rows` has the `Rows` of each argument. A sum over ranks makes the rows
    whole. An addition, a copy or a wait returns a summand.
    """
    name = operators.operator_name(call.node)
    distinct = set(map(whole, rows))
    if len(distinct) != 1:
        return None
    (found,) = distinct
    if named(name).sums_ranks:
        return found if call.given["reduce_op"] == "sum" else None
    # Any other operator would compute with the zeros that stand for other ranks' rows.
    row = named(name)
    is_kept = name in _ADDS or row.is_identity or row.copies or row.wait is not None
    return replace(found, share=next(each.share for each in rows if is_summand(each))) if is_kept else None
