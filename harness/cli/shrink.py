"""`bitproof shrink`: a failing case made small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import app
from bitproof.harness.cli.options import (
    Candidate,
    CaseName,
    Collectives,
    Data,
    Device,
    EarlyGradAccumulation,
    ExtraPass,
    Inject,
    Jobs,
    MeetingIn,
    NoKeptGraph,
    OnDevice,
    Reference,
    ReportDir,
    ShareGpus,
    Steps,
    WorldSize,
    check_seconds,
    chosen_jobs,
    find_case,
    kept_graphs_folder,
    make_changes,
)
from bitproof.harness.commands.run import Changes, replay_options


@app.command("shrink")
def shrink_command(
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
    tries: Annotated[int, typer.Option(min=0, metavar="N", help="Most runs of smaller cases.")] = 200,
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time to spend on them.")
    ] = 1800.0,
    report_dir: ReportDir = Path("reports"),
    jobs: Jobs = "auto",
    data: Data = None,
) -> None:
    """Make a failing case as small as it can be and still fail the same way, and write what shows it."""
    from bitproof.harness.commands.shrink import shrink_and_report
    from bitproof.harness.localize.shrink_case import Budget
    from bitproof.harness.options import RunOptions

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
        inject=inject,
        extra_passes=tuple(extra_pass or ()),
        jobs=chosen_jobs(jobs),
    )
    # The small case's file will hold the changes, and which extra passes stay is found out.
    replay = replay_options(Changes(), replace(options, extra_passes=()))
    found = find_case(case, changes)
    raise typer.Exit(shrink_and_report(found, options, Budget(tries, timeout), report_dir, replay))
