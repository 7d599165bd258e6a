"""`bitproof doctor`: what this machine can run."""

from __future__ import annotations

from pathlib import Path

import typer

from harness.cli.app import app
from harness.cli.options import ReportDir
from harness.report.status import SUCCESS, UNJUDGED


@app.command("doctor")
def doctor_command(report_dir: ReportDir = Path("reports")) -> None:
    """Say what this machine can run, and why not the rest."""
    from harness.commands import doctor

    checks = []
    for check in doctor.examine(report_dir):
        checks.append(check)
        print(check, flush=True)
    summary = doctor.summarize(checks)
    print(summary)
    raise typer.Exit(SUCCESS if summary.is_ok else UNJUDGED)
