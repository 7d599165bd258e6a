"""`bitproof localize` and `bitproof bisect`: where one case's systems part, and which pass makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.app import app
from harness.cli.options import (
    Candidate,
    CaseName,
    Data,
    Device,
    EarlyGradAccumulation,
    ExtraPass,
    Inject,
    OnDevice,
    Reference,
    ReportDir,
    Steps,
    WorldSize,
    find_case,
    make_changes,
    replay_options,
)
from harness.report.text import CASE_FILE

COMMANDS = {
    "localize": "Run a case and tell all that is known of its first difference.",
    "bisect": "Find the pass that first changes a case's bits, and, of the chunk pass, the region.",
}


def _register(command_name: str, help_text: str) -> None:
    """Add a command. All of them look into one case, so they have their options in common."""

    @app.command(command_name, help=help_text)
    def command(
        case: CaseName,
        candidate: Candidate = None,
        reference: Reference = None,
        steps: Steps = None,
        world_size: WorldSize = None,
        device: OnDevice = Device.AUTO,
        early_grad_accumulation: EarlyGradAccumulation = False,
        inject: Inject = None,
        extra_pass: ExtraPass = None,
        report_dir: ReportDir = Path("reports"),
        timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time for a run.")] = 600.0,
        data: Data = None,
    ) -> None:
        from harness import searching
        from harness.run_options import RunOptions

        changes = make_changes(
            reference=reference,
            candidate=candidate,
            steps=steps,
            world_size=world_size,
            data=data,
            early_grad_accumulation=early_grad_accumulation,
        )
        options = RunOptions(device=device.value, timeout=timeout, inject=inject, extra_passes=tuple(extra_pass or ()))
        replay = replay_options(changes, options) + ([CASE_FILE, case] if case.endswith(".json") else [])
        search = searching.localize if command_name == "localize" else searching.bisect
        raise typer.Exit(search(find_case(case, changes), options, report_dir, replay))


for _name, _help in COMMANDS.items():
    _register(_name, _help)
