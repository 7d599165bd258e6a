"""Print the table at the end of a run, and a paragraph for each unexpected case."""

from __future__ import annotations

from typing import TextIO

from bitproof.harness.records import CaseResult, Report, Verdict
from bitproof.harness.report import blocks, text
from bitproof.harness.report.case_row import row_of

COLORS = {
    Verdict.EQUAL: "green",
    Verdict.CLOSE: "cyan",
    Verdict.DIFFERENT: "yellow",
    Verdict.NONDETERMINISTIC: "red",
    Verdict.UNVERIFIED: "magenta",
    Verdict.ERROR: "red",
}
MAX_ERROR_CHARS = 4_000
NARROW = 120
"""A terminal with fewer columns is too narrow for the whole table."""


def print_report(report: Report, stream: TextIO | None = None) -> None:
    """Print the verdict table, then the causes of unexpected cases. Lines for a pipe are long and not wrapped."""
    from bitproof.harness.report.console import SafeConsole

    console = SafeConsole(stream)
    for line in text.headlines(report):
        console.print(line, style="bold white on red")
    console.print(_table(report, is_narrow=console.width < NARROW))
    console.print(text.tally(report))
    for result in report.cases:
        if result.closeness:
            console.print(f"{result.case.name}: {text.closeness(result)}")
        if result.layouts:
            console.print(f"{result.case.name}: {result.layouts.describe()}")
        for remark in result.remarks:
            console.print(f"{result.case.name}: {remark}")
        for name, found in result.checks.items():
            if shown := "\n".join(blocks.brief_lines(found)):
                console.print(f"{result.case.name}: {name}: {shown}")
    for remark in text.remarks(report):
        console.print(remark)
    for name, reason in report.not_run.items():
        console.print(f"{name}: NOT RUN: {reason}")
    console.print()
    # Causes come last: the end of the output is on the screen when the run is over.
    for result in report.cases:
        if not result.as_expected:
            console.print("\n".join([*case_lines(report, result), ""]))


def warm_up() -> None:
    """Import the library that prints the table in advance, since this takes time."""
    from rich import box, table, text  # noqa: F401

    from bitproof.harness.report import console  # noqa: F401


def _table(report: Report, is_narrow: bool) -> object:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    right = ("compared", "mismatched", "seconds")
    headers = ("case", "verdict", "expected", "ran on", *right, "first divergence")
    # A narrow terminal gets only the columns that fit without breaking words.
    shown = [header for header in headers if not is_narrow or header in ("case", "verdict", "expected", "seconds")]
    for header in shown:
        kept_whole = is_narrow and header == "case"
        table.add_column(header, overflow="fold", no_wrap=kept_whole, justify="right" if header in right else "left")
    for result, row in zip(report.cases, map(row_of, report.cases), strict=True):
        # Green means that no bit differs from the expectation. In a CLOSE case bits differ, though as expected.
        is_plain = result.as_expected and result.verdict != Verdict.CLOSE
        color = "green" if is_plain else COLORS[Verdict.DIFFERENT if any(result.objections()) else result.verdict]
        cells: tuple[str | Text, ...] = (
            Text(row.name),
            Text(row.outcome, style=color),
            Text(row.expectation),
            Text(row.place),
            str(row.compared),
            str(row.mismatched),
            f"{row.seconds:.1f}",
            Text(row.where),
        )
        table.add_row(*(cell for header, cell in zip(headers, cells, strict=True) if header in shown))
    return table


def case_lines(report: Report, result: CaseResult) -> list[str]:
    row = row_of(result)
    lines = [f"{row.name}: {row.sentence}"]
    if result.first_divergence:
        lines.append(f"  first divergence: {row.where}")
        if blamed := text.blame(result.first_divergence):
            lines.append(f"  {text.blame_label(result.first_divergence)}: {blamed}")
            rows = text.evidence(result.first_divergence.call)
            lines += [f"  {label}: {shown}" for label, shown in rows]
    for name, reason in result.objections():
        lines.append(f"  check {name}: {reason}")
    if result.error:
        lines += [f"  {line}" for line in text.shorten(result.error, MAX_ERROR_CHARS).splitlines()]
    return [*lines, f"  replay: {text.replay_command(report, result)}"]
