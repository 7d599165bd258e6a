"""`bitproof shrink` and `bitproof bisect`: find a smaller case that fails, or the pass that first changes bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.changes import Changes
from bitproof.harness.cli.arguments import ONE_CASE, WHERE, CaseName, ReportDir, find_case, refuse_seconds
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.cli.localize import LOOK_OPTIONS, look_at
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import TIME, to_argv

_OPTIONS = (*ONE_CASE, *WHERE, "early_grad_accumulation", "inject", "extra_passes", "jobs")


@command(
    "shrink",
    "bitproof shrink moe_seq --inject flip-bit",
    "bitproof shrink case.json --tries 50",
    brief="Find the smallest case that fails in the same way.",
    statuses=("the case does not fail", "a smaller case that fails is written", "the case cannot be judged"),
)
@takes(Changes, RunOptions, only=_OPTIONS)
def shrink_command(
    case: CaseName,
    tries: Annotated[
        int, typer.Option(min=0, metavar="N", help="At most N runs of smaller cases.", rich_help_panel=TIME)
    ] = 200,
    timeout: Annotated[
        float,
        typer.Option(
            min=1,
            callback=refuse_seconds,
            metavar="SECONDS",
            help="Time limit of these runs.",
            rich_help_panel=TIME,
        ),
    ] = 1800.0,
    report_dir: ReportDir = Path("reports"),
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Find the smallest case that fails in the same way, and write it as files."""
    from bitproof.harness.powers.shrink.shrink_case import Budget
    from bitproof.harness.powers.shrink.shrink_command import shrink_and_report

    # The small case's file contains the changes; the search decides which extra passes stay.
    replay = to_argv(replace(options, extra_passes=()))
    found = find_case(case, changes)
    shrunk = shrink_and_report(found, options, Budget(tries, timeout), report_dir, replay)
    raise typer.Exit(shrunk.exit_status)


@command(
    "bisect",
    "bitproof bisect moe_seq --extra-pass my_pass.py:fuse",
    "bitproof bisect case.json --steps 1",
    brief="Find the pass that first changes a case's bits.",
)
@takes(Changes, RunOptions, only=LOOK_OPTIONS)
def bisect_command(
    case: CaseName, report_dir: ReportDir = Path("reports"), *, changes: Changes, options: RunOptions
) -> None:
    """Find the pass that first changes a case's bits, and, of the chunk pass, the region."""
    from bitproof.harness.powers.shrink.bisect_command import bisect

    look_at(bisect, case, report_dir, changes, options)
