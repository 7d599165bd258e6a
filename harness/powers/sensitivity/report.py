"""A case's sensitivity in reports: a clause beside the verdict, and tables of the calls whose errors are seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.sensitivity.records import Sensitivity, SensitivityRow, by_direction
from bitproof.harness.records import CaseResult, Finding, Sentence, Table
from bitproof.harness.validate import read

HEADERS = ("module", "direction", "calls", "tried", "seen", "at once", "blind", "share")
FORMULA_HEADERS = ("operator", "neighbouring formula", "calls", "seen", "same bits", "lost")
REASON_HEADERS = ("direction", "operator", "calls", "what became of the difference")
MAX_REASONS = 25


def clause(found: Sensitivity) -> str:
    """Return a clause to follow the verdict, such as `sees 97.8% of 2,826 calls`; "" if nothing was measured.

    For a sample it includes the confidence interval: `sees 97.8% (96.9-98.4%) of 2,826 calls`.
    """
    if found.share is None:
        return ""
    low, high = found.interval or (0.0, 0.0)
    about = f" ({100 * low:.1f}-{100 * high:.1f}%)" if found.interval else ""
    return f"sees {percent(found.share)}{about} of {found.total('calls') - found.total('blind'):,} calls"


def percent(share: float) -> str:
    """Return a share to one decimal, such as 97.8%; never 100.0% for a share below 1."""
    rounded = f"{100 * share:.1f}%"
    return "99.9%" if rounded == "100.0%" and share < 1 else rounded


def headline(found: Sensitivity) -> str:
    """Return a line with `clause`, sample size, calls seen at the first try, blind calls, ranks, steps and time."""
    if found.share is None:
        return f"sensitivity not measured: {found.reason or 'no call was tried'}"
    tried = f", by a sample of {found.total('tried'):,}" if found.is_sampled else ""
    seconds = "" if found.seconds is None else f"; {found.seconds:.0f} s"
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    return (
        f"{clause(found)}{tried} ({found.total('at_once'):,} at once, by the first element in the first step; "
        f"{found.total('blind'):,} more are blind by nature), {found.ranks} ranks, {steps}{seconds}"
    )


def rows(found: Sensitivity) -> list[tuple[str, ...]]:
    """Return the rows of a table: the totals of each direction, then each module and direction.

    Rows without tried calls are left out.
    """
    return [_row(row) for row in [*by_direction(found.rows), *found.rows] if row.tried]


def _row(row: SensitivityRow) -> tuple[str, ...]:
    can_see = row.tried - row.blind
    counts = (row.calls, row.tried, row.seen, row.at_once, row.blind)
    return (row.module, row.direction, *map(str, counts), percent(row.seen / can_see) if can_see else "-")


def formula_rows(found: Sensitivity) -> list[tuple[str, ...]]:
    return [(x.operator, x.formula, *map(str, (x.tried, x.seen, x.same, x.lost))) for x in found.formulas]


def reason_rows(found: Sensitivity, is_blind: bool) -> list[tuple[str, ...]]:
    """Return table rows on where the errors of unseen calls disappeared, the most frequent first.

    If `is_blind`, the rows are about blind calls instead, whose errors no comparison can see.
    """
    counts = Counter((x.direction, x.operator, x.reason) for x in found.unseen if x.is_blind == is_blind)
    return [(way, name, str(count), reason) for (way, name, reason), count in counts.most_common()]


def tables(found: Sensitivity) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    yield "calls seen, by module and direction", HEADERS, rows(found)
    for title, is_blind in (("calls not seen", False), ("calls blind by nature", True)):
        found_rows = reason_rows(found, is_blind)
        if found_rows:
            more = f", the first {MAX_REASONS} of {len(found_rows)} kinds" if len(found_rows) > MAX_REASONS else ""
            yield title + more, REASON_HEADERS, found_rows[:MAX_REASONS]
    if found.shown:
        yield "first shown by", ("kind", "calls"), [(kind, str(count)) for kind, count in found.shown.items()]
    if found.formulas:
        yield "neighbouring formulas", FORMULA_HEADERS, formula_rows(found)


def finding_of(found: Sensitivity) -> Finding:
    parts = [Table(title, tuple(headers), tuple(rows)) for title, headers, rows in tables(found)] if found.rows else []
    return Finding(brief=clause(found), blocks=(Sentence(headline(found)), *parts), data=asdict(found))


def measured(result: CaseResult) -> Sensitivity | None:
    """Return a case's sensitivity from its result; None if it was not requested or not measured."""
    finding = result.checks.get("sensitivity")
    return None if finding is None else read_data(finding.data)


def read_data(data: dict[str, Any]) -> Sensitivity:
    """Read the sensitivity from the JSON data of a finding. Raises RecordingError if the data is damaged."""
    return read(Sensitivity, data, "checks.sensitivity.data", RecordingError, damaged="is damaged")
