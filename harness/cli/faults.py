"""`bitproof faults`: which faults are caught, and are they found where they struck?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import Expression, app
from bitproof.harness.cli.options import (
    Candidate,
    CaseFile,
    Collectives,
    Device,
    MeetingIn,
    ObserveActivations,
    OnDevice,
    Reference,
    ReportDir,
    WorldSize,
    check_seconds,
    chosen_cases,
    make_changes,
)
from bitproof.harness.commands.run import replay_options

DEFAULT_CASES = (
    "moe_seq",
    "transformer_batch",
    "experts_seq_sight",
    "blocks_batch_sight",
    "blocks_batch_offload",
    "blocks_batch_bucketed_float32",
    "tp_ep_shared",
    "experts_seq_world4",
)
"""Where nothing is selected: each fault goes into the first of them that should see it."""


@app.command("faults")
def faults_command(
    expression: Expression = None,
    case_file: CaseFile = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="NAME", help="Only this fault, or this family. Repeatable.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show the catalogue, and run nothing.")] = False,
    candidate: Candidate = None,
    reference: Reference = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that each run takes.")] = 2,
    world_size: WorldSize = None,
    observe: ObserveActivations = None,
    device: OnDevice = Device.AUTO,
    collectives: MeetingIn = Collectives.AUTO,
    report_dir: ReportDir = Path("reports"),
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write the table into this page, between its marks.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN_DIR", help="Go on from an earlier call, which left this folder."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time for a fault.")
    ] = 120.0,
) -> None:
    """Put every fault of the catalogue into cases: which are caught, and are they found where they struck?"""
    from bitproof.harness.commands.faults import Page, choose, faults, list_faults
    from bitproof.harness.options import RunOptions

    entries = choose(fault or ())
    if list_only:
        print("\n".join(list_faults(entries)))
        return
    changes = make_changes(
        reference=reference, candidate=candidate, steps=steps, world_size=world_size, observe=tuple(observe or ())
    )
    cases = chosen_cases(expression, case_file, DEFAULT_CASES, changes)
    options = RunOptions(
        device=device.value, collectives=collectives.value, timeout=timeout, control="never", inject=None
    )
    replay = replay_options(changes, options)
    everywhere = expression is not None
    chosen = [part for name in fault or () for part in ("--fault", name)]
    call = shlex.join(["bitproof", "faults", *(["-k", expression] if expression else []), *chosen, *replay])
    into = None if page is None else Page(page, call)
    status = faults(cases, entries, options, report_dir, everywhere=everywhere, replay=replay, page=into, resume=resume)
    raise typer.Exit(status)
