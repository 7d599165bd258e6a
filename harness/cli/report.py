"""`bitproof report`: what a run came to, printed again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.declare import command
from bitproof.harness.errors import UsageError


@command("report", "bitproof report reports/latest", "bitproof report reports/latest --format junit")
def report_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, such as reports/latest.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="md|html|junit|json", help="What to print the report as.")
    ] = "md",
) -> None:
    """Print a run's report again, made anew from its report.json."""
    from bitproof.harness.history.beside import read_run
    from bitproof.harness.report.write import check_format, render_as

    check_format(format_name)
    if not run_dir.is_dir():
        raise UsageError("there is no such run folder", expected="a folder with report.json", found=str(run_dir))
    text = render_as(read_run(run_dir), format_name)
    sys.stdout.write(text.encode(errors="backslashreplace").decode())
