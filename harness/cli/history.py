"""`bitproof history`: verdicts, times and flake rates over nights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.cli.app import Expression, app
from bitproof.harness.cli.declare import command
from bitproof.harness.history.trends import DEFINITIONS

history = typer.Typer(
    help="Keep the results of every night in an SQLite file, and show verdicts, times and flake rates.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(history, name="history")

Database = Annotated[Path, typer.Option("--db", metavar="FILE", help="The SQLite file.")]
DEFAULT = Path("reports/history.sqlite")


@command("add", "bitproof history add reports/latest", to=history)
def add_command(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders, such as reports/latest.")],
    db: Database = DEFAULT,
) -> None:
    """Add runs, all or none. A run that is already there changes nothing."""
    from bitproof.harness.history.database import add_runs

    for run_id, is_new in add_runs(db, run_dirs):
        print(f"{run_id} {'added to' if is_new else 'was already in'} {db}")


@history.command("show", epilog=". ".join(f"{name.capitalize()}: {meaning}" for name, meaning in DEFINITIONS.items()))
def show_command(
    db: Database = DEFAULT,
    last: Annotated[int, typer.Option(min=1, metavar="N", help="Take the newest N nights.")] = 30,
    expression: Expression = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it, as FILE.svg or FILE.html.")] = None,
) -> None:
    """Show each case's verdicts, times and flake rate over nights, and when its machine or versions changed."""
    from bitproof.harness.history.database import read_nights
    from bitproof.harness.history.show import print_trends, render_json
    from bitproof.harness.history.trends import trends_of

    nights = read_nights(db, last)
    trends = trends_of(nights, expression)
    if plot is not None:
        from bitproof.harness.history.plot import write_plot

        write_plot(plot, nights, trends)
    if as_json:
        print(render_json(nights, trends))
    else:
        print_trends(nights, trends)
