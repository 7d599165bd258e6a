"""Write a comment for a pull request in Markdown: changes since another run, or the unexpected cases.

A case has changed if it is new or gone, or if its outcome or cause is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bitproof.harness.records import CaseResult, Report
from bitproof.harness.report import text
from bitproof.harness.report.case_row import row_of
from bitproof.harness.report.markdown_text import Strong, code_block, folded, inline, table_of

MAX_CHARS = 60_000
"""Below GitHub's limit of 65,536 characters per comment."""
MAX_CELL = 300
HEADERS = ("case", "was", "is", "first divergence", "to blame")


def render(report: Report, against: Report | None = None) -> str:
    """Return the comment's text. `against` is the report of the other run, if any."""
    rows = list(_changes(report, against) if against else _problems(report))
    bad = [result for result in report.cases if not result.as_expected]
    good = len(report.cases) - len(bad)
    title = f"{len(bad)} of {len(report.cases)} cases not as expected" if bad else f"all {good} cases as expected"
    since = f"since run {against.run_id}" if against else "of checks and verdicts"
    head = [f"### bitproof: {inline(title)}", f"{inline(text.tally(report))}. Run {inline(report.run_id)}."]
    same = f"Nothing changed {inline(since)}." if not rows else ""
    # Escaping makes the size of a row unknown before it is rendered: render, and halve the rows until the page fits.
    while True:
        table = table_of(HEADERS, rows) if rows else ""
        replays = [text.replay_command(report, result) for result in bad[: len(rows) or 1]]
        parts = [*head, same, table, folded("Replay", code_block("\n".join(replays))) if replays else ""]
        page = "\n\n".join(filter(None, parts)) + "\n"
        if len(page) <= MAX_CHARS or not rows:
            return page[:MAX_CHARS]
        rows, head = rows[: len(rows) // 2], [*head[:2], "The table is cut; report.json has all of it."]


def _changes(report: Report, against: Report) -> Iterator[tuple[Any, ...]]:
    # What is left in `before` at the end has no result in this run.
    before = {_key(result): result for result in against.cases}
    for result in report.cases:
        old = before.pop(_key(result), None)
        if old is None or _outcome_and_cause(old) != _outcome_and_cause(result):
            yield _row(result, "not there" if old is None else row_of(old).outcome)
    for old in before.values():
        yield _cells(old.case.name, row_of(old).outcome, "not run", "", "")


def _problems(report: Report) -> Iterator[tuple[Any, ...]]:
    for result in report.cases:
        if not result.as_expected:
            yield _row(result, f"expected {text.expectation(result)}")


def _key(result: CaseResult) -> tuple[str, str, str]:
    return result.case.name, result.case.reference, result.case.candidate


def _outcome_and_cause(result: CaseResult) -> tuple[str, ...]:
    return row_of(result).outcome, row_of(result).where, text.blame(result.first_divergence), *_blamed(result)


def _blamed(result: CaseResult) -> list[str]:
    return [text.blame_of(call) for found in result.checks.values() for call in found.calls]


def _row(result: CaseResult, was: str) -> tuple[Any, ...]:
    row = row_of(result)
    # The call to blame between the two systems, or else those that checks blame, or else the checks' reasons.
    reasons = [f"check {name}: {reason}" for name, reason in result.objections()]
    blamed = text.blame(result.first_divergence) or "; ".join(dict.fromkeys(_blamed(result) or reasons))
    outcome = row.outcome if result.as_expected else Strong(row.outcome)
    return _cells(row.name, was, outcome, row.where, blamed)


def _cells(*values: str) -> tuple[Any, ...]:
    cut = (text.shorten(value, MAX_CELL, "report.json has it") for value in values)
    return tuple(
        Strong(short) if isinstance(value, Strong) else short for value, short in zip(values, cut, strict=True)
    )
