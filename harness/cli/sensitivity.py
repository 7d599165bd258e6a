"""`bitproof sensitivity`: how much of a step would a case's comparison see?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.case.case_file import read_case
from harness.cli.app import Expression, app, selected_cases
from harness.cli.options import (
    Candidate,
    NoKeptGraph,
    Reference,
    ReportDir,
    Steps,
    WorldSize,
    check_seconds,
    kept_graphs_folder,
    make_changes,
)
from harness.commands.run import change_case, replay_options

MAIN_CASES = ("transformer_batch", "moe_batch", "moe_seq")
"""Where nothing is selected."""


@app.command("sensitivity")
def sensitivity_command(
    expression: Expression = None,
    case_file: Annotated[
        Path | None, typer.Option("--case", metavar="FILE", help="The case in this JSON file, instead of -k.")
    ] = None,
    candidate: Candidate = None,
    reference: Reference = None,
    steps: Steps = None,
    world_size: WorldSize = None,
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
    from harness.commands.sensitivity import sensitivity
    from harness.errors import UsageError
    from harness.options import Effort, RunOptions
    from harness.report.text import CASE_FILE

    changes = make_changes(reference=reference, candidate=candidate, steps=steps, world_size=world_size)
    if case_file is not None and expression is not None:
        raise UsageError("-k and --case both say what to run", expected="one of them", found=f"-k {expression!r}")
    if case_file is not None:
        selected = [read_case(case_file)]
    elif expression is not None:
        selected = selected_cases(expression)
    else:
        by_name = {case.name: case for case in selected_cases(None)}
        selected = [by_name[name] for name in MAIN_CASES]
    cases = [change_case(case, changes) for case in selected]
    options = RunOptions(
        device="cpu",
        timeout=timeout,
        control="never",
        kept_graphs=kept_graphs_folder(no_kept_graph),
        sensitivity=Effort(sample=sample, seconds=limit or None),
    )
    replay = [*replay_options(changes, options), *([CASE_FILE, str(case_file)] if case_file else [])]
    raise typer.Exit(sensitivity(cases, options, report_dir, replay))
