"""`bitproof sensitivity`: how much of a step would a case's comparison see?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import Expression, app
from bitproof.harness.cli.options import (
    Candidate,
    CaseFile,
    EveryCall,
    NoKeptGraph,
    ObserveActivations,
    Reference,
    ReportDir,
    Steps,
    WorldSize,
    check_seconds,
    chosen_cases,
    kept_graphs_folder,
    make_changes,
)
from bitproof.harness.commands.run import replay_options

MAIN_CASES = ("transformer_batch", "moe_batch", "moe_seq")
"""Where nothing is selected."""


@app.command("sensitivity")
def sensitivity_command(
    expression: Expression = None,
    case_file: CaseFile = None,
    candidate: Candidate = None,
    reference: Reference = None,
    steps: Steps = None,
    world_size: WorldSize = None,
    observe: ObserveActivations = None,
    every_call: EveryCall = False,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Try this many calls, drawn by the case's seed, not all.")
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            min=0,
            callback=check_seconds,
            metavar="SECONDS",
            help="Begin no further call after this time a case: what was tried is a random sample. 0: try all.",
        ),
    ] = 600.0,
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time for a case's run.")
    ] = 600.0,
    no_kept_graph: NoKeptGraph = False,
    report_dir: ReportDir = Path("reports"),
) -> None:
    """Make each call of a step wrong by one ULP, one at a time: which would a case's comparison see?"""
    from bitproof.harness.commands.sensitivity import sensitivity
    from bitproof.harness.options import Effort, RunOptions
    from bitproof.harness.report.text import CASE_FILE

    changes = make_changes(
        reference=reference, candidate=candidate, steps=steps, world_size=world_size, observe=tuple(observe or ())
    )
    cases = chosen_cases(expression, case_file, MAIN_CASES, changes)
    options = RunOptions(
        device="cpu",
        timeout=timeout,
        control="never",
        every_call=every_call,
        kept_graphs=kept_graphs_folder(no_kept_graph),
        sensitivity=Effort(sample=sample, seconds=limit or None),
    )
    replay = [*replay_options(changes, options), *([CASE_FILE, str(case_file)] if case_file else [])]
    raise typer.Exit(sensitivity(cases, options, report_dir, replay))
