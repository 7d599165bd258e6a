"""Options that several commands share, besides the settings of a run: cases, and the report folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.case_file import read_case
from bitproof.harness.case.select import select
from bitproof.harness.changes import Changes, change_case, named_case
from bitproof.harness.cli.app import CASES, REPORTS, selected_cases
from bitproof.harness.cli.completion import names_of_cases
from bitproof.harness.errors import UsageError
from bitproof.harness.options import check_seconds

ONE_CASE = ("candidate", "reference", "steps", "world_size", "data", "chunk_modules", "chunk_dim", "preload")
"""The keywords of the changes that each command with a single case offers."""

WHERE = ("device", "share_gpus", "collectives", "no_kept_graph")
"""The keywords of the options for the ranks' device, and for cached graphs."""

CaseName = Annotated[
    str,
    typer.Argument(
        metavar="CASE",
        help="A case's name, as `bitproof list` shows it, or its JSON file.",
        autocompletion=names_of_cases,
    ),
]
CaseNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CASE",
        help="Cases of these names, or their JSON files.",
        show_default=False,
        autocompletion=names_of_cases,
    ),
]
CaseFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--case",
        metavar="FILE",
        help="Take the case in this JSON file; -k then selects among such cases. Repeatable.",
        rich_help_panel=CASES,
    ),
]
ReportDir = Annotated[
    Path,
    typer.Option("--report-dir", metavar="DIR", help="Directory for run directories.", rich_help_panel=REPORTS),
]


def refuse_seconds(value: float) -> float:
    """Return the number of seconds. Raises BadParameter if it is too large to wait for."""
    if problem := check_seconds(value):
        raise typer.BadParameter(problem)
    return value


def read_file(path: Path) -> Case:
    return read_case(path, lambda: selected_cases(None))


def find_case(name: str, changes: Changes) -> Case:
    """Return the case with this name, or the case in the JSON file `name`, after applying `changes`. Raises UsageError
    or CaseError.
    """
    if name.endswith(".json"):
        return change_case(read_file(Path(name)), changes)
    return named_case(selected_cases(None), name, changes)


def chosen_cases(
    expression: str | None,
    case_files: Sequence[Path] | None,
    changes: Changes,
    usual: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> list[Case]:
    """Return the cases that -k selects, after applying `changes`: from the files of --case, or else from all built-in
    cases.

    With `names`, return exactly the cases with these names. Without -k, --case and names, return the cases in `usual`,
    or all. Raises UsageError if two cases share a name.
    """
    if names:
        if expression is not None or case_files:
            raise UsageError("cases are given twice", expected="cases, -k or --case", found=" ".join(names))
        # A name that is given twice is one case.
        return [find_case(name, changes) for name in dict.fromkeys(names)]
    if case_files:
        selected = select([read_file(file) for file in case_files], expression)
        for name, count in Counter(case.name for case in selected).items():
            if count > 1:
                raise UsageError(f"{count} of the files given by --case hold a case {name}", expected="a name for each")
    elif expression is not None or usual is None:
        selected = selected_cases(expression)
    else:
        # In the order of `usual`, not of the cases.
        by_name = {case.name: case for case in selected_cases(None)}
        selected = [by_name[name] for name in usual]
    return [change_case(case, changes) for case in selected]


def case_words(case_files: Sequence[Path] | None, names: Sequence[str] | None = None) -> list[str]:
    """Return the command-line words for these case files, and for files among `names`, to repeat a run.

    The words have absolute paths.
    """
    from bitproof.harness.report.text import CASE_FILE

    files = [*(case_files or ()), *(Path(name) for name in names or () if name.endswith(".json"))]
    return [word for file in files for word in (CASE_FILE, str(file.absolute()))]
