"""`bitproof record` and `bitproof diff`: one system's recording, and two compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.capture.selection import parse_values
from bitproof.harness.cli.app import app
from bitproof.harness.cli.options import (
    BaselineDir,
    CaseName,
    Collectives,
    Data,
    Device,
    MeetingIn,
    NoKeptGraph,
    ObserveActivations,
    OnDevice,
    ReportDir,
    ShareGpus,
    Steps,
    WorldSize,
    check_seconds,
    chosen_baseline_dir,
    find_case,
    kept_graphs_folder,
    make_changes,
)


@app.command("record")
def record_command(
    case: CaseName,
    system: Annotated[str, typer.Option(metavar="SYSTEM", help="The system to record.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The recording's folder, which must not exist yet.")
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="File the recording under its environment, to hold later runs against.")
    ] = False,
    baseline_dir: BaselineDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the baseline of this environment.")] = False,
    values: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Keep the values of these tensors: kinds, as in grad,param, or a pattern over step/kind/name, as in "
            "'*/grad/layers.1.*'. Repeatable. [default: none; of a baseline, the first and the last step]",
            show_default=False,
        ),
    ] = None,
    steps: Steps = None,
    world_size: WorldSize = None,
    data: Data = None,
    observe: ObserveActivations = None,
    device: OnDevice = Device.AUTO,
    share_gpus: ShareGpus = False,
    collectives: MeetingIn = Collectives.AUTO,
    no_kept_graph: NoKeptGraph = False,
    report_dir: ReportDir = Path("reports"),
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time for the run.")
    ] = 600.0,
) -> None:
    """Record one system alone, to compare with a recording from another machine, commit or version."""
    from bitproof.harness.commands.record import Target, record
    from bitproof.harness.options import RunOptions

    changes = make_changes(steps=steps, world_size=world_size, data=data, observe=tuple(observe or ()))
    target = Target(out=out, baseline_dir=chosen_baseline_dir(baseline, baseline_dir), force=force)
    options = RunOptions(
        device=device.value,
        share_gpus=share_gpus,
        collectives=collectives.value,
        kept_graphs=kept_graphs_folder(no_kept_graph),
        timeout=timeout,
        values=parse_values(values or ()),
    )
    raise typer.Exit(record(find_case(case, changes), system, options, target, report_dir))


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="DIR_A", help="A recording's folder.")],
    second: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another.")],
) -> None:
    """Compare two recordings."""
    from bitproof.harness.commands.record import diff

    raise typer.Exit(diff(first, second))
