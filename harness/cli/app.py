"""The command line's root: the program, and what several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness.case import Case
from harness.errors import UsageError
from harness.select import select

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
BaselineDir = Annotated[
    Path | None,
    typer.Option(
        "--baseline-dir", metavar="DIR", help="The baselines' folder. [default: baselines]", show_default=False
    ),
]


def selected_cases(expression: str | None) -> list[Case]:
    """The cases that an expression selects. Imported here: a case that contradicts itself is told as an error."""
    from cases import all_cases

    return list(select(all_cases(), expression))


def chosen_baseline_dir(baseline: bool, baseline_dir: Path | None) -> Path | None:
    """The folder that --baseline means, or None without it. Raises UsageError for a folder that nothing would use."""
    if baseline_dir is not None and not baseline:
        raise UsageError("--baseline-dir says nothing without --baseline", fix="add --baseline")
    return (baseline_dir or Path("baselines")) if baseline else None
