"""`bitproof report`: print a run's report again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.declare import DONE, command
from bitproof.harness.errors import UsageError


@command(
    "report",
    "bitproof report reports/latest",
    "bitproof report reports/latest --format junit",
    "bitproof report reports/latest --format comment --against reports/main",
    statuses=DONE,
)
def report_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, such as reports/latest.")],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="md|html|junit|sarif|json|comment|annotations",
            help="The format: a whole report, or the text of a pull request's comment, or GitHub's annotations.",
        ),
    ] = "md",
    against: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="With --format comment, show what changed since this run.")
    ] = None,
) -> None:
    """Print a run's report again, from its report.json."""
    from bitproof.harness.execute.run_folder import read_run
    from bitproof.harness.report.ci import comment
    from bitproof.harness.report.write import check_format, render_as
    from bitproof.harness.runtime.output import styled

    check_format(format_name)
    if against is not None and format_name != "comment":
        raise UsageError("--against is of a comment", expected="--format comment", found=f"--format {format_name}")
    for folder in (run_dir, *([] if against is None else [against])):
        if not folder.is_dir():
            raise UsageError("there is no such run folder", expected="a folder with report.json", found=str(folder))
    report = read_run(run_dir)
    text = render_as(report, format_name) if against is None else comment.render(report, read_run(against))
    text = text.encode(errors="backslashreplace").decode()
    # Annotations are commands for GitHub's runners, so they bypass the gate that makes output harmless.
    stream = styled(sys.stdout) if format_name == "annotations" else sys.stdout
    stream.write(text)
