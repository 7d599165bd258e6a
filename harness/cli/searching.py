"""`bitproof localize` and `bitproof bisect`: where one case's systems part, and which pass makes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.app import Device, ReportDir, app, selected_cases
from harness.errors import UsageError
from harness.graph.options import SYNTAX
from harness.run import Changes

if TYPE_CHECKING:
    from harness.run_options import RunOptions

COMMANDS = {
    "localize": "Run a case and tell all that is known of its first difference.",
    "bisect": "Find the pass that first changes a case's bits, and, of the chunk pass, the region.",
}


def _register(command_name: str, help_text: str) -> None:
    """Add a command. All of them look into one case, so they have their options in common."""

    @app.command(command_name, help=help_text)
    def command(
        case: Annotated[str, typer.Argument(metavar="CASE", help="A case's name, as `bitproof list` shows it.")],
        candidate: Annotated[str | None, typer.Option(metavar="SYSTEM", help="Candidate system.")] = None,
        reference: Annotated[str | None, typer.Option(metavar="SYSTEM", help="Reference system.")] = None,
        steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
        world_size: Annotated[int | None, typer.Option(min=1, help="Ranks.")] = None,
        device: Annotated[Device, typer.Option(help="Where ranks compute.")] = Device.AUTO,
        early_grad_accumulation: Annotated[
            bool,
            typer.Option(
                "--early-grad-accumulation", help="Add both chunks' gradients before their cast and reduction."
            ),
        ] = False,
        inject: Annotated[
            str | None, typer.Option(metavar="FAULT", help="Put a deliberate defect in the candidate.")
        ] = None,
        extra_pass: Annotated[
            list[str] | None,
            typer.Option(metavar=SYNTAX, help="Put a pass of your own into the candidate graph. Repeatable."),
        ] = None,
        report_dir: ReportDir = Path("reports"),
        timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time for a run.")] = 600.0,
        data: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Text to train on instead of the default.")
        ] = None,
    ) -> None:
        if data is not None and not data.is_file():
            raise UsageError("there is no such data file", expected="a text file", found=str(data))
        from harness import searching
        from harness.recordings import named_case
        from harness.run_options import RunOptions

        changes = Changes(
            reference=reference,
            candidate=candidate,
            steps=steps,
            world_size=world_size,
            data=None if data is None else str(data),
            early_grad_accumulation=early_grad_accumulation,
        )
        changed = named_case(selected_cases(None), case, changes)
        options = RunOptions(device=device.value, timeout=timeout, inject=inject, extra_passes=tuple(extra_pass or ()))
        search = searching.localize if command_name == "localize" else searching.bisect
        raise typer.Exit(search(changed, options, report_dir, _replay_options(changes, options)))


def _replay_options(changes: Changes, options: RunOptions) -> list[str]:
    """The options of `bitproof run` with which the same systems run again."""
    values = {
        "--candidate": changes.candidate,
        "--reference": changes.reference,
        "--steps": changes.steps,
        "--world-size": changes.world_size,
        "--data": changes.data,
        "--inject": options.inject,
        "--device": None if options.device == Device.AUTO else options.device,
    }
    given = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    given += ["--early-grad-accumulation"] if changes.early_grad_accumulation else []
    return given + [part for text in options.extra_passes for part in ("--extra-pass", text)]


for _name, _help in COMMANDS.items():
    _register(_name, _help)
