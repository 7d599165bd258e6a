"""`bitproof record` and `bitproof diff`: one system's recording, and two compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.app import Device, ReportDir, app, selected_cases


@app.command("record")
def record_command(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's name, as `bitproof list` shows it.")],
    system: Annotated[str, typer.Option(metavar="SYSTEM", help="The system to record.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The recording's folder, which must not exist yet.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = Device.AUTO,
    report_dir: ReportDir = Path("reports"),
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time for the run.")] = 600.0,
) -> None:
    """Record one system alone, to compare with a recording from another machine, commit or version."""
    from harness.recordings import named_case, record
    from harness.run_options import RunOptions

    options = RunOptions(device=device.value, timeout=timeout)
    raise typer.Exit(record(named_case(selected_cases(None), case, steps), system, options, out, report_dir))


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="DIR_A", help="A recording's folder.")],
    second: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another.")],
) -> None:
    """Compare two recordings."""
    from harness.recordings import diff

    raise typer.Exit(diff(first, second))
