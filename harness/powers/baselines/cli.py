"""`bitproof accept`: store drifted recordings as the new baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.changes import Changes
from bitproof.harness.cli.app import Expression
from bitproof.harness.cli.arguments import ONE_CASE, WHERE, CaseFiles, ReportDir, case_words, chosen_cases
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.options import RunOptions
from bitproof.harness.settings import to_argv


@command(
    "accept",
    "bitproof accept -k moe_seq --why 'the router sums in float32 now'",
    "bitproof accept -k moe_seq --certificate upgrade/moved.json",
    brief="Accept how far cases drifted from their baselines.",
)
@takes(
    Changes,
    RunOptions,
    only=(*ONE_CASE, "observe", *WHERE, "control", "timeout", "explain_timeout", "jobs"),
)
def accept_command(
    why: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The reason, stored in the baselines' manifests.")
    ] = None,
    certificate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Accept the drift that this certificate of `moved` explains, also from another environment. "
            "Repeatable.",
        ),
    ] = None,
    expression: Expression = None,
    case_files: CaseFiles = None,
    new: Annotated[bool, typer.Option("--new", help="Also store a baseline where there is none.")] = False,
    baseline_dir: Annotated[Path, typer.Option("--baseline-dir", metavar="DIR", help="Directory of baselines.")] = Path(
        "baselines"
    ),
    report_dir: ReportDir = Path("reports"),
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Run cases, show how far they drifted from their baselines and which operator moved, and accept the drift."""
    from bitproof.harness.powers.baselines.accept_command import accept
    from bitproof.harness.powers.baselines.check import BaselineOptions

    cases = chosen_cases(expression, case_files, changes)
    replay = [*to_argv(changes, options, BaselineOptions(baseline_dir)), *case_words(case_files)]
    raise typer.Exit(
        accept(
            cases, options, report_dir, baseline_dir, why or "", new=new, replay=replay, certificates=certificate or ()
        )
    )
