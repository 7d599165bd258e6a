"""`bitproof record` and `bitproof diff`: record a system, and compare two recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bitproof.harness.capture.selection import parse_values
from bitproof.harness.changes import Changes
from bitproof.harness.checks.shipped import shipped
from bitproof.harness.cli.arguments import WHERE, CaseName, ReportDir, find_case
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.options import RunOptions

_OPTIONS = (
    *("steps", "world_size", "data", "observe", "preload"),
    *WHERE,
    *("values", "baseline", "baseline_dir", "timeout"),
)
_SAYS = {
    "baseline": "Store the recording as the baseline of its environment, to compare later runs with.",
    "timeout": "Time limit of the run.",
}


@command(
    "record",
    "bitproof record moe_seq --system graph --out recordings/here",
    "bitproof record moe_seq --system graph --baseline",
    brief="Record one system, to compare it with elsewhere.",
    statuses=("recorded", None, "the system fails"),
)
@takes(Changes, RunOptions, shipped("baseline").Options, only=_OPTIONS, says=_SAYS)
def record_command(
    case: CaseName,
    system: Annotated[str, typer.Option(metavar="SYSTEM", help="The system to record.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The recording's directory, which must not exist yet.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the baseline of this environment.")] = False,
    report_dir: ReportDir = Path("reports"),
    *,
    changes: Changes,
    options: RunOptions,
    baseline: Any,
) -> None:
    """Record one system alone, to compare with a recording from another machine, commit or version."""
    from bitproof.harness.commands.record import Target, record

    target = Target(out=out, baseline_dir=baseline.baseline_dir, force=force)
    options = replace(options, values=parse_values(options.values))
    raise typer.Exit(record(find_case(case, changes), system, options, target, report_dir))


@command(
    "diff",
    "bitproof diff recordings/here recordings/there",
    "bitproof diff recordings/here recordings/there --certificate moved.json",
    statuses=("equal, bit for bit", "different", "a recording cannot be read"),
)
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="DIR_A", help="A recording's folder.")],
    second: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another.")],
    certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Say whether this certificate explains the difference: see `moved`."),
    ] = None,
) -> None:
    """Compare two recordings."""
    from bitproof.harness.commands.record import diff

    raise typer.Exit(diff(first, second, certificate=certificate))
