"""Options that several commands share, what they change about a case, and how a replay repeats them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.case_file import read_case
from bitproof.harness.cli.app import selected_cases
from bitproof.harness.commands.run import Changes, change_case, check_data, named_case
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.options import SYNTAX
from bitproof.harness.program.kept import default_folder


class Device(StrEnum):
    """Where ranks compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Collectives(StrEnum):
    """Where ranks meet."""

    AUTO = "auto"
    SHARED = "shared"
    GLOO = "gloo"
    NATIVE = "native"


class Control(StrEnum):
    """When each system runs a second time."""

    ALWAYS = "always"
    WHEN_DIFFERENT = "when-different"


MAX_SECONDS = 1e9
MAX_JOBS = 999


def check_seconds(value: float) -> float:
    """The value of --timeout. Raises BadParameter for a time that no clock can wait for."""
    if not value <= MAX_SECONDS:  # nor is NaN
        raise typer.BadParameter(f"{value} is not a number of seconds up to {MAX_SECONDS:g}.")
    return value


def check_jobs(value: str) -> str:
    """The value of --jobs. Raises BadParameter for what is no number of runs."""
    if value != "auto" and not (value.isascii() and value.isdecimal() and 1 <= int(value) <= MAX_JOBS):
        raise typer.BadParameter(f"{value} is neither a number from 1 to {MAX_JOBS} nor auto.")
    return value


def chosen_jobs(value: str) -> int | Literal["auto"]:
    """What --jobs means."""
    return "auto" if value == "auto" else int(value)


ExplainTimeout = Annotated[
    float,
    typer.Option(
        "--explain-timeout",
        min=1,
        callback=check_seconds,
        metavar="SECONDS",
        help="Longest time to find a cause, once there is a verdict.",
    ),
]
CaseName = Annotated[
    str, typer.Argument(metavar="CASE", help="A case's name, as `bitproof list` shows it, or its JSON file.")
]
CaseFile = Annotated[
    Path | None, typer.Option("--case", metavar="FILE", help="The case in this JSON file, instead of -k.")
]
Candidate = Annotated[str | None, typer.Option("--candidate", metavar="SYSTEM", help="Another candidate system.")]
Reference = Annotated[str | None, typer.Option("--reference", metavar="SYSTEM", help="Another reference system.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Another number of training steps.")]
WorldSize = Annotated[int | None, typer.Option("--world-size", min=1, help="Another number of ranks.")]
MeetingIn = Annotated[
    Collectives,
    typer.Option(
        "--collectives",
        help="Where ranks meet: shared memory, or gloo's sockets, with the same bits; native: NCCL's own sums.",
    ),
]
OnDevice = Annotated[Device, typer.Option("--device", help="Where ranks compute.")]
ShareGpus = Annotated[
    bool,
    typer.Option("--share-gpus", help="With --device cuda, let ranks share GPUs over gloo where there are too few."),
]
EarlyGradAccumulation = Annotated[
    bool,
    typer.Option("--early-grad-accumulation", help="Add both chunks' gradients before their cast and reduction."),
]
Inject = Annotated[
    str | None, typer.Option("--inject", metavar="FAULT", help="Put a deliberate defect in the candidate.")
]
ExtraPass = Annotated[
    list[str] | None,
    typer.Option(
        "--extra-pass",
        metavar=SYNTAX,
        help="Put a pass of your own into the candidate graph, by default after all that rewrite it. Repeatable.",
    ),
]
Data = Annotated[Path | None, typer.Option("--data", metavar="FILE", help="Text to train on instead of the default.")]
NoKeptGraph = Annotated[
    bool,
    typer.Option("--no-kept-graph", help="Trace every graph anew, and keep none: see BITPROOF_CACHE in the documents."),
]
EveryCall = Annotated[
    bool,
    typer.Option(
        "--every-call",
        help="Compare every operator call of an EQUAL case: values that the reference never had make it DIFFERENT.",
    ),
]
ObserveActivations = Annotated[
    list[str] | None,
    typer.Option(
        "--observe",
        metavar="PATTERN",
        help="Record what these modules return, and its gradients, too: layers.*, or layers.** for all in them. "
        "Repeatable.",
    ),
]
Jobs = Annotated[
    str,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N|auto",
        callback=check_jobs,
        help="Run so many cases side by side; auto: as many as find a core for each rank, and memory.",
    ),
]
ReportDir = Annotated[Path, typer.Option("--report-dir", metavar="DIR", help="Folder that holds a folder a run.")]
BaselineDir = Annotated[
    Path | None,
    typer.Option(
        "--baseline-dir", metavar="DIR", help="The baselines' folder. [default: baselines]", show_default=False
    ),
]


def make_changes(*, data: Path | None = None, **values: Any) -> Changes:
    """What a command line changes about a case. Raises UsageError for a file of data that is not there."""
    return Changes(data=check_data(data), **values)


def kept_graphs_folder(no_kept_graph: bool) -> Path | None:
    """The folder of graphs that are kept from run to run, None where none shall be."""
    return None if no_kept_graph else default_folder()


def find_case(name: str, changes: Changes) -> Case:
    """The case of a name, or in a JSON file, changed. Raises UsageError or CaseError when there is none."""
    if name.endswith(".json"):
        return change_case(read_case(Path(name)), changes)
    return named_case(selected_cases(None), name, changes)


def chosen_cases(expression: str | None, case_file: Path | None, usual: Sequence[str], changes: Changes) -> list[Case]:
    """What -k or --case selects, or, where neither is given, the cases of these names; each of them changed.

    Raises UsageError where both are given, and what a wrong expression or file raises.
    """
    if case_file is not None and expression is not None:
        raise UsageError("-k and --case both say what to run", expected="one of them", found=f"-k {expression!r}")
    if case_file is not None:
        selected = [read_case(case_file)]
    elif expression is not None:
        selected = selected_cases(expression)
    else:
        by_name = {case.name: case for case in selected_cases(None)}
        selected = [by_name[name] for name in usual]
    return [change_case(case, changes) for case in selected]


def chosen_baseline_dir(baseline: bool, baseline_dir: Path | None) -> Path | None:
    """The folder that --baseline means, or None without it. Raises UsageError for a folder that nothing would use."""
    if baseline_dir is not None and not baseline:
        raise UsageError("--baseline-dir says nothing without --baseline", fix="add --baseline")
    return (baseline_dir or Path("baselines")) if baseline else None
