"""`bitproof doctor`: what this machine can run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.arguments import ReportDir
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.options import RunOptions
from bitproof.harness.report.status import SUCCESS, UNJUDGED


@command("doctor", "bitproof doctor", "bitproof doctor --device cuda --gpu")
@takes(RunOptions, only=("device",), says={"device": "Where ranks compute."})
def doctor_command(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check on all GPUs what training steps need, then run the three main cases.")
    ] = False,
    report_dir: ReportDir = Path("reports"),
    *,
    options: RunOptions,
) -> None:
    """Report what this machine can run, and why it cannot run the rest."""
    if gpu:
        raise typer.Exit(_examine_gpus(report_dir))
    from bitproof.harness.commands import doctor

    checks = []
    for check in doctor.examine(report_dir, needs_gpus=options.device == "cuda"):
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
