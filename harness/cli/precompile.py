"""`bitproof precompile`: one step for all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import app
from bitproof.harness.cli.options import (
    Candidate,
    CaseName,
    Device,
    EarlyGradAccumulation,
    OnDevice,
    WorldSize,
    check_seconds,
    find_case,
    make_changes,
)


@app.command("precompile")
def precompile_command(
    case: CaseName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The step's folder; a step that is in it is replaced.")],
    candidate: Candidate = None,
    world_size: WorldSize = None,
    device: OnDevice = Device.AUTO,
    early_grad_accumulation: EarlyGradAccumulation = False,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT", help="Strike a fault into what both ranks trace, to see that the comparison finds it."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time for it.")
    ] = 600.0,
) -> None:
    """Make a case's step in one process without ranks, for `run --precompiled`."""
    from bitproof.harness.commands.precompile import precompile
    from bitproof.harness.options import RunOptions

    changes = make_changes(candidate=candidate, world_size=world_size, early_grad_accumulation=early_grad_accumulation)
    options = RunOptions(device=device.value, inject=inject, timeout=timeout)
    raise typer.Exit(precompile(find_case(case, changes), out, options))
