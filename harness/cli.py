"""The command line. Exit status: 0 as expected, 1 not as expected, 2 wrong call, 3 not judged.

Loads neither torch nor pandas: `bitproof list` answers at once, and ranks start from a clean process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness.case import Case
from harness.devices import unmet_requirement
from harness.errors import BitproofError, UsageError
from harness.graph.options import SYNTAX
from harness.report.status import SUCCESS, UNJUDGED, error_status
from harness.run import Changes, change_case, run_and_report
from harness.select import asks_for, select

app = typer.Typer(
    name="bitproof",
    help="Does a graph pipeline compute exactly what eager computes, bit for bit?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Device(StrEnum):
    """Where ranks compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Expression = Annotated[
    str | None, typer.Option("-k", metavar="EXPR", help="Cases to take, in pytest's -k syntax: 'moe and not seq'.")
]
ReportDir = Annotated[Path, typer.Option("--report-dir", metavar="DIR", help="Folder that holds a folder a run.")]


@app.command("list")
def list_command(
    expression: Expression = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the cases."""
    rows = [_describe(case) for case in _selected(expression)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    columns = list(rows[0])
    lines = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


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
    cases = [change_case(case, changes) for case in _selected(expression)]
    # Who asks for a case gets its verdict, here or not.
    not_run = (
        {}
        if asks_for(expression)
        else {case.name: why for case in cases if (why := unmet_requirement(case, device.value))}
    )
    cases = [case for case in cases if case.name not in not_run]
    from harness.launch import RunOptions

    options = RunOptions(
        device=device.value,
        timeout=timeout,
        control="when_different" if control is None else "always" if control else "never",
        inject=inject,
        extra_passes=tuple(extra_pass or ()),
        dump_graphs=dump_graphs,
        verbose=verbose,
    )
    replay = _replay_options(changes, device=device.value, inject=inject, control=control)
    replay += [part for text in extra_pass or () for part in ("--extra-pass", text)]
    raise typer.Exit(run_and_report(cases, options, report_dir, replay, not_run))


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
    from harness.launch import RunOptions
    from harness.recordings import named_case, record

    options = RunOptions(device=device.value, timeout=timeout)
    raise typer.Exit(record(named_case(_selected(None), case, steps), system, options, out, report_dir))


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="DIR_A", help="A recording's folder.")],
    second: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another.")],
) -> None:
    """Compare two recordings."""
    from harness.recordings import diff

    raise typer.Exit(diff(first, second))


@app.command("report")
def report_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, such as reports/latest.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="md|html|junit|json", help="What to print the report as.")
    ] = "md",
) -> None:
    """Print a run's report again, made anew from its report.json."""
    from harness.report import json as report_json
    from harness.report.write import check_format, render_as

    check_format(format_name)
    if not run_dir.is_dir():
        raise UsageError("there is no such run folder", expected="a folder with report.json", found=str(run_dir))
    text = render_as(report_json.read(run_dir / report_json.FILE_NAME), format_name)
    sys.stdout.write(text.encode(errors="backslashreplace").decode())


@app.command("doctor")
def doctor_command(report_dir: ReportDir = Path("reports")) -> None:
    """Say what this machine can run, and why not the rest."""
    from harness import doctor

    checks = []
    for check in doctor.examine(report_dir):
        checks.append(check)
        print(check, flush=True)
    summary = doctor.summarize(checks)
    print(summary)
    raise typer.Exit(SUCCESS if summary.is_ok else UNJUDGED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A user's mistake is told in words, our own as a traceback."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="bitproof")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else SUCCESS if end.code is None else UNJUDGED
    except BitproofError as error:
        print(error, file=sys.stderr)
        return error_status(error)
    except Exception:
        traceback.print_exc()
        return UNJUDGED
    return SUCCESS


def _selected(expression: str | None) -> list[Case]:
    """The cases that an expression selects. Imported here: a case that contradicts itself is told as an error."""
    from cases import all_cases

    return list(select(all_cases(), expression))


def _describe(case: Case) -> dict[str, str | int]:
    return {
        "name": case.name,
        "family": case.family,
        "expected": case.expected,
        "reference": case.reference,
        "candidate": case.candidate,
        "world_size": case.parallelism.world_size,
        "steps": case.steps,
    }


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
