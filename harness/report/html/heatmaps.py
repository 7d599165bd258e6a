"""Make the page's heatmaps: the number of records that differ at each step, by kind and by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report import text

MAX_COLUMNS = 40
ROW_CELLS = 6  # a row's own markup is as large as so many cells

Cell = tuple[str, str, str]
"""A cell's text, shade and tooltip. Shade 0: all agree; 1 to 4: the share that differs; "x": unknown to the report."""


@dataclass(frozen=True, kw_only=True)
class KindHeat:
    """The heatmap of kinds of records.

    - `rows`: for each kind: its name, the numbers of compared and of differing records, and a cell per column.
    - `left_out`: the number of differing records that the report does not list by step.
    """

    steps: list[str]
    rows: list[tuple[str, int, int, list[Cell]]]
    all_agree: bool
    total: int
    left_out: int


@dataclass(frozen=True, kw_only=True)
class TensorHeat:
    """The heatmap of tensors.

    - `groups`: for each kind, its tensors. Each tensor has its name, a cell per column, and the ranks on which it
      differs.
    - `hidden`: the number of differing tensors without a row.
    """

    steps: list[str]
    groups: list[tuple[str, list[tuple[str, list[Cell], str]]]]
    hidden: int
    world_size: int


class _Columns:
    """The columns of a heatmap: steps, or ranges of steps if there are too many."""

    def __init__(self, result: CaseResult) -> None:
        steps = result.case.compared_steps
        width = max(1, math.ceil(len(steps) / MAX_COLUMNS))
        self.ranges = [steps[at : at + width] for at in range(0, len(steps), width)]
        self.labels = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in self.ranges]
        differing = [int(step) for names in result.differing.values() for found in names.values() for step in found]
        # From this step on the report leaves out keys: a tensor that it does not list may differ, too.
        self._unsure = max(differing, default=0) if result.differing_left_out else result.steps
        self._agrees = "x" if result.verdict == Verdict.UNVERIFIED else "0"

    def cell(self, column: int, count: int, share: float, tooltip: str = "") -> Cell:
        # More records may differ than the report lists, so the count is only a lower bound, and 0 means nothing.
        if self.ranges[column][-1] >= self._unsure:
            return f"{count}+" if count else "?", shade_of(share) if count else "x", tooltip
        return str(count), shade_of(share) if count else self._agrees, tooltip


def shade_of(share: float) -> str:
    return str(max(1, min(4, math.ceil(4 * share))))


def by_kind(result: CaseResult) -> KindHeat | None:
    """Return the heatmap of the kinds of records; None if no record was compared."""
    if not any(result.compared.values()):
        return None
    columns = _Columns(result)
    # Old reports count differing records without listing them: then the steps of the differences are unknown.
    is_known = bool(result.differing) or not any(result.mismatched.values())
    rows = []
    for kind, compared in result.compared.items():
        found = result.differing.get(kind, {})
        counts = [
            sum(len(ranks) for steps in found.values() for step, ranks in steps.items() if int(step) in steps_of)
            for steps_of in columns.ranges
        ]
        # The number of records of this kind in a step, on all ranks, if every step has equally many.
        a_step = max(1, compared / len(result.case.compared_steps))
        cells = [
            columns.cell(i, count, count / (a_step * len(columns.ranges[i]))) if compared else ("", "", "")
            for i, count in enumerate(counts)
        ]
        rows.append((kind, compared, result.mismatched[kind], cells if is_known else []))
    return KindHeat(
        steps=columns.labels if is_known else [],
        rows=rows,
        all_agree=result.verdict == Verdict.EQUAL,
        total=sum(result.compared.values()),
        left_out=result.differing_left_out,
    )


def wanted_cells(result: CaseResult) -> int:
    num_tensors = sum(map(len, result.differing.values()))
    return num_tensors * (len(_Columns(result).ranges) + ROW_CELLS) if num_tensors else 0


def by_tensor(result: CaseResult, max_cells: int) -> TensorHeat | None:
    """Return the heatmap of the differing tensors, in the order of their first difference, of about `max_cells` cells.

    Return None if the report lists no differing tensor.
    """
    if not result.differing:
        return None
    columns = _Columns(result)
    # The rows that are left for further kinds; a case shows at least 10.
    left = max(10, max_cells // (len(columns.ranges) + ROW_CELLS))
    groups, hidden = [], 0
    for kind in result.compared:
        found = result.differing.get(kind, {})
        shown = list(found.items())[:left]
        left, hidden = left - len(shown), hidden + len(found) - len(shown)
        if shown:
            groups.append((kind, [(name, *_tensor_row(steps, columns, result)) for name, steps in shown]))
    return TensorHeat(steps=columns.labels, groups=groups, hidden=hidden, world_size=result.world_size)


def _tensor_row(steps: dict[str, list[int]], columns: _Columns, result: CaseResult) -> tuple[list[Cell], str]:
    cells = []
    for column, steps_of in enumerate(columns.ranges):
        ranks = {rank for step in steps_of for rank in steps.get(str(step), ())}
        tooltip = f"rank {text.rank_ranges(ranks)}" if 0 < len(ranks) < result.world_size else ""
        cells.append(columns.cell(column, len(ranks), len(ranks) / result.world_size, tooltip))
    return cells, text.rank_ranges({rank for ranks in steps.values() for rank in ranks})
