"""`bitproof shrink`: a failing case made small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.case_file import read_case
from harness.cli.app import Device, ReportDir, app, selected_cases
from harness.graph.options import SYNTAX
from harness.run import Changes, change_case


@app.command("shrink")
def shrink_command(
    name: Annotated[str, typer.Argument(metavar="CASE", help="A case's name, or its JSON file.")],
    candidate: Annotated[str | None, typer.Option(metavar="SYSTEM", help="Another candidate system.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="SYSTEM", help="Another reference system.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps to begin with.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks to begin with.")] = None,
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = Device.AUTO,
    early_grad_accumulation: Annotated[
        bool,
        typer.Option("--early-grad-accumulation", help="Add both chunks' gradients before their cast and reduction."),
    ] = False,
    inject: Annotated[
        str | None, typer.Option(metavar="FAULT", help="Put a deliberate defect in the candidate.")
    ] = None,
    extra_pass: Annotated[
        list[str] | None,
        typer.Option(metavar=SYNTAX, help="Put a pass of your own into the candidate graph. Repeatable."),
    ] = None,
    tries: Annotated[int, typer.Option(min=0, metavar="N", help="Most runs of smaller cases.")] = 200,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time to spend on them.")] = 1800.0,
    report_dir: ReportDir = Path("reports"),
) -> None:
    """Make a failing case as small as it can be and still fail the same way, and write what shows it."""
    from harness.localize.shrink_case import Budget
    from harness.recordings import named_case
    from harness.run_options import RunOptions
    from harness.shrink import shrink_and_report

    changes = Changes(
        reference=reference,
        candidate=candidate,
        steps=steps,
        world_size=world_size,
        early_grad_accumulation=early_grad_accumulation,
    )
    if name.endswith(".json"):
        case = change_case(read_case(Path(name)), changes)
    else:
        case = named_case(selected_cases(None), name, changes)
    options = RunOptions(device=device.value, inject=inject, extra_passes=tuple(extra_pass or ()))
    replay = [] if device == Device.AUTO else ["--device", device.value]
    replay += [] if inject is None else ["--inject", inject]
    raise typer.Exit(shrink_and_report(case, options, Budget(tries, timeout), report_dir, replay))
