"""`bitproof run`: run cases, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.case_file import read_case
from bitproof.harness.case.select import asks_for
from bitproof.harness.cli.app import Expression, app, selected_cases
from bitproof.harness.cli.options import (
    BaselineDir,
    Candidate,
    Collectives,
    Control,
    Data,
    Device,
    EarlyGradAccumulation,
    EveryCall,
    ExplainTimeout,
    ExtraPass,
    Inject,
    Jobs,
    MeetingIn,
    NoKeptGraph,
    ObserveActivations,
    OnDevice,
    Reference,
    ReportDir,
    ShareGpus,
    Steps,
    WorldSize,
    check_seconds,
    chosen_baseline_dir,
    chosen_jobs,
    kept_graphs_folder,
    make_changes,
)
from bitproof.harness.commands.run import change_case, replay_options, run_and_report
from bitproof.harness.commands.shard import cases_of, parse_shard
from bitproof.harness.errors import UsageError
from bitproof.harness.machine.devices import unmet_requirement
from bitproof.harness.options import Effort, RunOptions, Stress
from bitproof.harness.report.text import CASE_FILE
from bitproof.harness.systems.names import read_names


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
    share_gpus: ShareGpus = False,
    collectives: MeetingIn = Collectives.AUTO,
    no_kept_graph: NoKeptGraph = False,
    precompiled: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Let the candidate's ranks read this precompiled step, and trace none."),
    ] = None,
    trust_compiled: Annotated[
        bool, typer.Option("--trust-compiled", help="Let a precompiled step run the code that was compiled for it.")
    ] = False,
    early_grad_accumulation: EarlyGradAccumulation = False,
    observe: ObserveActivations = None,
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
    prove_first: Annotated[
        bool,
        typer.Option("--prove-first", help="Prove each case before any runs; tell what may differ."),
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="Measure how much of a step each case sees, as `sensitivity` does."),
    ] = False,
    report_dir: ReportDir = Path("reports"),
    timeout: Annotated[
        float, typer.Option(min=1, callback=check_seconds, metavar="SECONDS", help="Longest time for a case.")
    ] = 600.0,
    explain_timeout: ExplainTimeout = 600.0,
    shard: Annotated[
        str | None, typer.Option(metavar="i/n", help="Run one of n parts of the selected cases; `merge` joins them.")
    ] = None,
    jobs: Jobs = "1",
    data: Data = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write what each rank's time goes into, as a trace that Perfetto reads.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Of a case that is EQUAL, tell calls whose values the reference never had.")
    ] = False,
    every_call: EveryCall = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Write the passes' debug logs to the logs.")] = False,
) -> None:
    """Run cases on every rank, compare, and write a report."""
    changes = make_changes(
        reference=reference,
        candidate=candidate,
        steps=steps,
        world_size=world_size,
        data=data,
        early_grad_accumulation=early_grad_accumulation,
        observe=tuple(observe or ()),
    )
    selected = selected_cases(expression) if case_file is None else [_case_in(case_file, expression)]
    cases = [change_case(case, changes) for case in selected]
    part = None if shard is None else parse_shard(shard, cases)
    cases = cases if part is None else cases_of(part)
    not_run = {} if case_file is not None or asks_for(expression) else _left_out(cases, device)
    left_out = tuple(case for case in cases if case.name in not_run)
    cases = [case for case in cases if case.name not in not_run]
    options = RunOptions(
        device=device.value,
        share_gpus=share_gpus,
        collectives=collectives.value,
        kept_graphs=kept_graphs_folder(no_kept_graph),
        precompiled=precompiled,
        trust_compiled=trust_compiled,
        timeout=timeout,
        explain_timeout=explain_timeout,
        control=_when_to_repeat(control, no_control),
        inject=inject,
        extra_passes=tuple(extra_pass or ()),
        dump_graphs=dump_graphs,
        verbose=verbose,
        stress=_stress(stress, stress_threads),
        names={} if names is None else read_names(names),
        baseline_dir=chosen_baseline_dir(baseline, baseline_dir),
        profile=profile,
        deep=deep,
        every_call=every_call,
        jobs=chosen_jobs(jobs),
        sensitivity=Effort() if sensitivity else None,
    )
    files = {"--names": names, CASE_FILE: case_file}
    named = [part for option, file in files.items() if file is not None for part in (option, str(file))]
    replay = [*replay_options(changes, options), *(["--prove-first"] if prove_first else []), *named]
    status = run_and_report(
        cases, options, report_dir, replay, not_run, part, left_out=left_out, prove_first=prove_first
    )
    raise typer.Exit(status)


def _when_to_repeat(control: Control | None, no_control: bool) -> Literal["always", "when_different", "never"]:
    if no_control and control is not None:
        raise UsageError("--control and --no-control contradict each other", fix="leave out one of them")
    return "never" if no_control else "when_different" if control == Control.WHEN_DIFFERENT else "always"


def _stress(is_asked_for: bool, num_threads: int | None) -> Stress | None:
    if num_threads is not None and not is_asked_for:
        raise UsageError("--stress-threads is about runs under stress", fix="give --stress too")
    return Stress(num_threads=num_threads or 1) if is_asked_for else None


def _left_out(cases: list[Case], device: Device) -> dict[str, str]:
    """Why this machine cannot judge a case, by name. Who asks for a case gets its verdict, here or not."""
    return {case.name: why for case in cases if (why := unmet_requirement(case, device.value))}


def _case_in(file: Path, expression: str | None) -> Case:
    if expression is not None:
        raise UsageError("-k and --case both say what to run", expected="one of them", found=f"-k {expression!r}")
    return read_case(file)
