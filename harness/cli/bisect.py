"""`bitproof bisect`: which pass makes a case's systems part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.app import app
from harness.cli.options import (
    Candidate,
    CaseName,
    Collectives,
    Data,
    Device,
    EarlyGradAccumulation,
    ExtraPass,
    Inject,
    MeetingIn,
    NoKeptGraph,
    OnDevice,
    Reference,
    ReportDir,
    ShareGpus,
    Steps,
    WorldSize,
    check_seconds,
    find_case,
    kept_graphs_folder,
    make_changes,
)
from harness.commands.run import replay_options
from harness.report.text import CASE_FILE


@app.command("bisect")
def bisect_command(
    case: CaseName,
    candidate: Candidate = None,
    reference: Reference = None,
    steps: Steps = None,
    world_size: WorldSize = None,
    device: OnDevice = Device.AUTO,
    share_gpus: ShareGpus = False,
    collectives: MeetingIn = Collectives.AUTO,
    no_kept_graph: NoKeptGraph = False,
    early_grad_accumulation: EarlyGradAccumulation = False,
    inject: Inject = None,
    extra_pass: ExtraPass = None,
    report_dir: ReportDir = Path("reports"),
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time for a run.")
    ] = 600.0,
    data: Data = None,
) -> None:
    """Find the pass that first changes a case's bits, and, of the chunk pass, the region."""
    from harness.commands.bisect import bisect
    from harness.options import RunOptions

    changes = make_changes(
        reference=reference,
        candidate=candidate,
        steps=steps,
        world_size=world_size,
        data=data,
        early_grad_accumulation=early_grad_accumulation,
    )
    options = RunOptions(
        device=device.value,
        share_gpus=share_gpus,
        collectives=collectives.value,
        kept_graphs=kept_graphs_folder(no_kept_graph),
        timeout=timeout,
        inject=inject,
        extra_passes=tuple(extra_pass or ()),
    )
    replay = replay_options(changes, options) + ([CASE_FILE, case] if case.endswith(".json") else [])
    raise typer.Exit(bisect(find_case(case, changes), options, report_dir, replay))
