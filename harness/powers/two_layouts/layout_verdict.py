"""Decides the verdict on two systems with different layouts, from their differences and the measured bounds."""

from __future__ import annotations

from bitproof.harness.compare.order import place_of
from bitproof.harness.records import Comparison, Divergence, InFloat64, Key, LayoutBounds, Verdict

USED_BY_ONE = 0.6
"""If a single tensor differs by more than rounding usually does, but by less than this share of its bound: no remark.

Among a hundred tensors, rounding alone may use half of the bound in one, such as a loss that moves by two units in the
last place. 7 of 60 correct pairs of systems had such a tensor (`bench_bounds.py`).
"""


def decide_by_layout(layouts: LayoutBounds) -> tuple[Verdict, str | None]:
    """Return a pair: the verdict, and the reason against CLOSE if it is known.

    The verdict is CLOSE if rounding explains all differences, otherwise DIFFERENT.
    """
    if layouts.is_rounding:
        return Verdict.CLOSE, None
    if layouts.is_within and layouts.in_float64:
        return Verdict.DIFFERENT, _float64_sentence(layouts.in_float64)
    row = next((row for row in layouts.rows if row.is_beyond), None)
    if row is None:
        return Verdict.DIFFERENT, None
    error = "infinite" if row.error is None else f"{row.error:.3g}"
    where = f"the relative error of step {row.step}, {row.kind} {row.name} is {error}"
    more = f"; {layouts.beyond} tensors are like this, and this is the first" if layouts.beyond > 1 else ""
    if row.apart:
        return Verdict.DIFFERENT, f"{where}, and ranks that hold the same part of it do not agree{more}"
    if row.bound is None:
        return Verdict.DIFFERENT, f"{where}, and it had to be equal: both layouts take the same sums up to it{more}"
    return Verdict.DIFFERENT, f"{where}, beyond the {row.bound:.3g} that sums in other orders explain{more}"


def first_beyond(layouts: LayoutBounds, comparison: Comparison) -> Divergence | None:
    """Return the first tensor that differs by more than rounding, on the first rank where it differs; None if there is
    none.
    """
    # The bounds of the case's own precision first, since their records are those of the comparison.
    beyond_in_float64 = layouts.in_float64.rows if layouts.in_float64 and layouts.in_float64.shows_defect else []
    for row in [*layouts.rows, *beyond_in_float64]:
        if row.is_beyond:
            ranks = comparison.differing.get(row.kind, {}).get(row.name, {}).get(str(row.step), (row.rank,))
            return Divergence(step=row.step, rank=ranks[0], kind=row.kind, name=row.name)
    return None


def _float64_sentence(found: InFloat64) -> str:
    row = found.rows[0]
    error = "infinite" if row.error is None else f"{row.error:.3g}"
    more = f"; {found.beyond} tensors are like this, and this is the first" if found.beyond > 1 else ""
    where = f"in float64 the relative error of step {row.step}, {row.kind} {row.name} is still {error}"
    return f"{where}, where sums in other orders explain {row.bound:.3g}{more}"


def remarks_on(layouts: LayoutBounds) -> list[str]:
    """Return remarks on a CLOSE verdict about the test in float64: why it was impossible, or signs of a defect."""
    found = layouts.in_float64
    if found is None:
        return []
    if found.failed is not None:
        why = (
            f"the second test, in float64, was not possible, so a defect as small as rounding may hide: {found.failed}"
        )
        return [why, *filter(None, [remark_on_near(layouts)])]
    remarks = []
    if found.beyond:
        remarks.append(
            f"a small defect is possible: {_float64_sentence(found)}. Or one side rounded numbers that the other did "
            f"not: {found.narrow} is the first call that reads float numbers of fewer bits from outside of torch"
        )
    if found.less_accurate is not None:
        remarks.append(
            f"the candidate is less accurate: against float64 its rounding error is {found.less_accurate:.1f} times "
            "the reference's, more than sums in other orders explain"
        )
    return remarks


def remark_on_near(layouts: LayoutBounds) -> str | None:
    """Return a remark on tensors within their bounds that differ by more than rounding usually does; None if there are
    none.

    Example: "a small defect is possible: 5 tensors differ by more than rounding usually does, ...".
    """
    # By module, the share of its bound that each tensor uses.
    used: dict[str, list[float]] = {}
    for row in layouts.rows:
        if row.used is not None:
            module, _ = place_of(Key(row.step, row.kind, row.name, row.rank))
            used.setdefault(module or f"the step itself ({row.kind} {row.name})", []).append(row.used)
    most = max(used, key=lambda module: max(used[module]), default=None)
    if most is None or not layouts.near or (layouts.near == 1 and max(used[most]) < USED_BY_ONE):
        return None
    rest = max((max(shares) for module, shares in used.items() if module != most), default=0.0)
    count = len(used[most])
    return (
        f"a small defect is possible: {layouts.near} tensors differ by more than rounding usually does, most of all "
        f"{count} tensor{'s' if count > 1 else ''} of {most}, by up to {100 * max(used[most]):.0f}% of the bound; "
        f"elsewhere at most {100 * rest:.0f}%"
    )


def remark_without_call(first: Divergence) -> str:
    module, direction = place_of(Key(first.step, first.kind, first.name, first.rank))
    where = f"{module or 'the step itself'} ({direction})"
    return f"no call is blamed, as calls of two layouts have no partners; {first.kind} {first.name} is of {where}"
