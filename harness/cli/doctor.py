"""`bitproof doctor`: what this machine can run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import app
from bitproof.harness.cli.options import Device, ReportDir
from bitproof.harness.report.status import SUCCESS, UNJUDGED


@app.command("doctor")
def doctor_command(
    device: Annotated[Device, typer.Option("--device", help="Where runs are to take place.")] = Device.AUTO,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Try on all GPUs what steps rely on, then the three main cases.")
    ] = False,
    report_dir: ReportDir = Path("reports"),
) -> None:
    """Say what this machine can run, and why not the rest."""
    if gpu:
        raise typer.Exit(_examine_gpus(report_dir))
    from bitproof.harness.commands import doctor

    checks = []
    for check in doctor.examine(report_dir, needs_gpus=device == Device.CUDA):
        checks.append(check)
        print(check, flush=True)
    summary = doctor.summarize(checks)
    print(summary)
    raise typer.Exit(SUCCESS if summary.is_ok else UNJUDGED)


def _examine_gpus(report_dir: Path) -> int:
    from bitproof.harness.commands import doctor_gpu

    lines = []
    for line in doctor_gpu.examine_gpus(report_dir):
        lines.append(line)
        print(line, flush=True)
    return doctor_gpu.status_of(lines)
