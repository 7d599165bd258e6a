"""`bitproof run`: run cases, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.case import Case
from harness.case_file import read_case
from harness.cli.app import Expression, app, selected_cases
from harness.cli.options import (
    BaselineDir,
    Candidate,
    Control,
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
    chosen_baseline_dir,
    make_changes,
    replay_options,
)
from harness.devices import unmet_requirement
from harness.errors import UsageError
from harness.names import read_names
from harness.report.text import CASE_FILE
from harness.run import change_case, run_and_report
from harness.select import asks_for
from harness.shard import cases_of, parse_shard


@app.command("run")
def run_command(
    expression: Expression = None,
    case_file: Annotated[
        Path | None, typer.Option("--case", metavar="FILE", help="Run the case in this JSON file, instead of -k.")
    ] = None,
    candidate: Candidate = None,
    reference: Reference = None,
    steps: Steps = None,
    world_size: WorldSize = None,
    device: OnDevice = Device.AUTO,
    early_grad_accumulation: EarlyGradAccumulation = False,
    inject: Inject = None,
    control: Annotated[
        Control | None,
        typer.Option(help="When each system runs twice, to tell noise from defects.", show_default="always"),
    ] = None,
    no_control: Annotated[bool, typer.Option("--no-control", help="Never run a system twice.")] = False,
    stress: Annotated[
        bool,
        typer.Option(
            "--stress", help="Run each system once more, with random sleeps and other values in fresh memory."
        ),
    ] = False,
    stress_threads: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Under stress, use N threads an operator. Right kernels may differ too."),
    ] = None,
    extra_pass: ExtraPass = None,
    dump_graphs: Annotated[
        bool, typer.Option("--dump-graphs", help="Write the graph after every pass into the run folder, with diffs.")
    ] = False,
    names: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON object from the candidate's own names to the reference's."),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Hold each system against its baseline, as `record --baseline` made it.")
    ] = False,
    baseline_dir: BaselineDir = None,
    report_dir: ReportDir = Path("reports"),
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time for a case.")] = 600.0,
    shard: Annotated[
        str | None, typer.Option(metavar="i/n", help="Run one of n parts of the selected cases; `merge` joins them.")
    ] = None,
    data: Data = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Write the passes' debug logs to the logs.")] = False,
) -> None:
    """Run cases on every rank, compare, and write a report."""
    if no_control and control is not None:
        raise UsageError("--control and --no-control contradict each other", fix="leave out one of them")
    if stress_threads is not None and not stress:
        raise UsageError("--stress-threads is about runs under stress", fix="give --stress too")
    changes = make_changes(
        reference=reference,
        candidate=candidate,
        steps=steps,
        world_size=world_size,
        data=data,
        early_grad_accumulation=early_grad_accumulation,
    )
    selected = selected_cases(expression) if case_file is None else [_case_in(case_file, expression)]
    cases = [change_case(case, changes) for case in selected]
    part = None if shard is None else parse_shard(shard, cases)
    cases = cases if part is None else cases_of(part)
    # Who asks for a case gets its verdict, here or not.
    not_run = (
        {}
        if case_file is not None or asks_for(expression)
        else {case.name: why for case in cases if (why := unmet_requirement(case, device.value))}
    )
    cases = [case for case in cases if case.name not in not_run]
    from harness.run_options import RunOptions
    from harness.stress import Stress

    options = RunOptions(
        device=device.value,
        timeout=timeout,
        control="never" if no_control else "when_different" if control == Control.WHEN_DIFFERENT else "always",
        inject=inject,
        extra_passes=tuple(extra_pass or ()),
        dump_graphs=dump_graphs,
        verbose=verbose,
        stress=Stress(num_threads=stress_threads or 1) if stress else None,
        names={} if names is None else read_names(names),
        baseline_dir=chosen_baseline_dir(baseline, baseline_dir),
    )
    replay = replay_options(changes, options)
    replay += [] if names is None else ["--names", str(names)]
    replay += [] if case_file is None else [CASE_FILE, str(case_file)]
    raise typer.Exit(run_and_report(cases, options, report_dir, replay, not_run, part))


def _case_in(file: Path, expression: str | None) -> Case:
    if expression is not None:
        raise UsageError("-k and --case both say what to run", expected="one of them", found=f"-k {expression!r}")
    return read_case(file)
