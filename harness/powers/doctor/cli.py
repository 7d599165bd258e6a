"""`bitproof doctor`: checks whether this machine can run cases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.arguments import ReportDir
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.options import RunOptions
from bitproof.harness.report.status import SUCCESS, UNJUDGED


@command(
    "doctor",
    "bitproof doctor",
    "bitproof doctor --gpu",
    "bitproof doctor --gpu --share-gpus",
    brief="Report what this machine can run.",
    statuses=("this machine can run the cases", "a check on GPUs fails", "something that cases need is missing"),
)
@takes(
    RunOptions,
    only=("device", "share_gpus"),
    says={
        "device": "Where ranks compute.",
        "share_gpus": "With --gpu, let 8 ranks share GPUs if there are fewer.",
    },
)
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
        raise typer.Exit(_examine_gpus(report_dir, share_gpus=options.share_gpus))
    from bitproof.harness.powers.doctor import command as doctor

    checks = []
    for check in doctor.examine(report_dir, needs_gpus=options.device == "cuda"):
        checks.append(check)
        print(check, flush=True)
    summary = doctor.summarize(checks)
    print(summary)
    raise typer.Exit(SUCCESS if summary.is_ok else UNJUDGED)


def _examine_gpus(report_dir: Path, *, share_gpus: bool) -> int:
    from bitproof.harness.powers.doctor import gpu_command

    lines = []
    for line in gpu_command.examine_gpus(report_dir, share_gpus=share_gpus):
        lines.append(line)
        print(line, flush=True)
    return gpu_command.status_of(lines)
