"""`bitproof localize`: find the cause of a case's first difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from bitproof.harness.case import Case
from bitproof.harness.changes import Changes
from bitproof.harness.cli.arguments import ONE_CASE, WHERE, CaseName, ReportDir, case_words, find_case
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import to_argv

Look = Callable[[Case, RunOptions, Path, list[str]], int]
"""A function that examines a case, prints the result and writes a report; it returns the exit status.

Its last argument has the options that a replay of the case must repeat.
"""

LOOK_OPTIONS = (
    *ONE_CASE,
    *WHERE,
    "early_grad_accumulation",
    "inject",
    "extra_passes",
    "timeout",
    "explain_timeout",
    "verify",
)


def look_at(look: Look, case: str, report_dir: Path, changes: Changes, options: RunOptions) -> None:
    """Find the case that is named `case`, examine it with `look`, and exit with the status that `look` returns."""
    replay = to_argv(changes, options) + case_words([Path(case)] if case.endswith(".json") else None)
    raise typer.Exit(look(find_case(case, changes), options, report_dir, replay))


@command(
    "localize",
    "bitproof localize moe_seq --inject flip-bit",
    "bitproof localize case.json --steps 2",
    brief="Run a case, and explain its first difference.",
)
@takes(Changes, RunOptions, only=LOOK_OPTIONS)
def localize_command(
    case: CaseName, report_dir: ReportDir = Path("reports"), *, changes: Changes, options: RunOptions
) -> None:
    """Run a case and report everything known about its first difference."""
    from bitproof.harness.commands.localize import localize

    look_at(localize, case, report_dir, changes, options)
