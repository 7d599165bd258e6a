"""`bitproof run`: run cases, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.app import BaselineDir, Device, Expression, ReportDir, app, chosen_baseline_dir, selected_cases
from harness.devices import unmet_requirement
from harness.errors import UsageError
from harness.graph.options import SYNTAX
from harness.run import Changes, change_case, run_and_report
from harness.select import asks_for


@app.command("run")
def run_command(
    expression: Expression = None,
    candidate: Annotated[str | None, typer.Option(metavar="SYSTEM", help="Candidate system for every case.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="SYSTEM", help="Reference system for every case.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps for every case.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks for every case.")] = None,
    device: Annotated[Device, typer.Option(help="Where ranks compute.")] = Device.AUTO,
    early_grad_accumulation: Annotated[
        bool,
        typer.Option("--early-grad-accumulation", help="Add both chunks' gradients before their cast and reduction."),
    ] = False,
    inject: Annotated[
        str | None, typer.Option(metavar="FAULT", help="Put a deliberate defect in the candidate.")
    ] = None,
    control: Annotated[
        bool | None,
        typer.Option(
            "--control/--no-control",
            help="Run each system twice, always or never, to tell noise from defects. [default: when they differ]",
            show_default=False,
        ),
    ] = None,
    extra_pass: Annotated[
        list[str] | None,
        typer.Option(
            metavar=SYNTAX,
            help="Put a pass of your own into the candidate graph, by default after all that rewrite it. Repeatable.",
        ),
    ] = None,
    dump_graphs: Annotated[
        bool, typer.Option("--dump-graphs", help="Write the graph after every pass into the run folder, with diffs.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Hold each system against its baseline, as `record --baseline` made it.")
    ] = False,
    baseline_dir: BaselineDir = None,
    report_dir: ReportDir = Path("reports"),
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time for a case.")] = 600.0,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to train on instead of the default.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Write the passes' debug logs to the logs.")] = False,
) -> None:
    """Run cases on every rank, compare, and write a report."""
    if data is not None and not data.is_file():
        raise UsageError("there is no such data file", expected="a text file", found=str(data))
    changes = Changes(
        reference=reference,
        candidate=candidate,
        steps=steps,
        world_size=world_size,
        data=None if data is None else str(data),
        early_grad_accumulation=early_grad_accumulation,
    )
    cases = [change_case(case, changes) for case in selected_cases(expression)]
    # Who asks for a case gets its verdict, here or not.
    not_run = (
        {}
        if asks_for(expression)
        else {case.name: why for case in cases if (why := unmet_requirement(case, device.value))}
    )
    cases = [case for case in cases if case.name not in not_run]
    from harness.run_options import RunOptions

    options = RunOptions(
        device=device.value,
        timeout=timeout,
        control="when_different" if control is None else "always" if control else "never",
        inject=inject,
        extra_passes=tuple(extra_pass or ()),
        dump_graphs=dump_graphs,
        verbose=verbose,
        baseline_dir=chosen_baseline_dir(baseline, baseline_dir),
    )
    replay = _replay_options(changes, device=device.value, inject=inject, control=control)
    replay += ["--baseline", "--baseline-dir", str(options.baseline_dir)] if options.baseline_dir else []
    replay += [part for text in extra_pass or () for part in ("--extra-pass", text)]
    raise typer.Exit(run_and_report(cases, options, report_dir, replay, not_run))


def _replay_options(changes: Changes, *, device: str, inject: str | None, control: bool | None) -> list[str]:
    """The options that a replay of one case must repeat: those that were not left at their default."""
    values = {
        "--candidate": changes.candidate,
        "--reference": changes.reference,
        "--steps": changes.steps,
        "--world-size": changes.world_size,
        "--data": changes.data,
        "--inject": inject,
        "--device": None if device == Device.AUTO else device,
    }
    options = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    options += ["--early-grad-accumulation"] if changes.early_grad_accumulation else []
    return options + ([] if control is None else ["--control" if control else "--no-control"])
