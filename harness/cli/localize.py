"""`bitproof localize` and `bitproof bisect`: where one case's systems part, and which pass makes them part.

Both take the same options, which are those of a run of one case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.cli.app import app
from bitproof.harness.cli.options import (
    Candidate,
    CaseName,
    Collectives,
    Data,
    Device,
    EarlyGradAccumulation,
    ExplainTimeout,
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
from bitproof.harness.commands.run import replay_options
from bitproof.harness.options import RunOptions
from bitproof.harness.report.text import CASE_FILE

Look = Callable[[Case, RunOptions, Path, list[str]], int]
"""Look into a case, report into a folder, and tell how to do it again; the exit status."""


def _command(name: str, summary: str) -> Callable[[Look], Look]:
    """Declare a command that looks into one case."""

    def declared(look: Look) -> Look:
        @app.command(name, help=summary)
        def command(
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
            explain_timeout: ExplainTimeout = 600.0,
            data: Data = None,
        ) -> None:
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
                explain_timeout=explain_timeout,
                inject=inject,
                extra_passes=tuple(extra_pass or ()),
            )
            replay = replay_options(changes, options) + ([CASE_FILE, case] if case.endswith(".json") else [])
            raise typer.Exit(look(find_case(case, changes), options, report_dir, replay))

        return look

    return declared


@_command("localize", "Run a case and tell all that is known of its first difference.")
def _localize(case: Case, options: RunOptions, report_dir: Path, replay: list[str]) -> int:
    from bitproof.harness.commands.localize import localize

    return localize(case, options, report_dir, replay)


@_command("bisect", "Find the pass that first changes a case's bits, and, of the chunk pass, the region.")
def _bisect(case: Case, options: RunOptions, report_dir: Path, replay: list[str]) -> int:
    from bitproof.harness.commands.bisect import bisect

    return bisect(case, options, report_dir, replay)
