"""The root of the command line, and an option type that several commands use."""

from __future__ import annotations

from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.select import select
from bitproof.harness.cli.completion import names_of_cases

CASES, REPORTS = "Which cases", "Reports"
"""Names of groups of options in a command's help; `harness.settings` has the others."""

app = typer.Typer(
    name="bitproof",
    help="Does a graph pipeline compute exactly what eager computes, bit for bit?",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from bitproof.harness import __version__

        print(f"bitproof {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Does a graph pipeline compute exactly what eager computes, bit for bit?"""


Expression = Annotated[
    str | None,
    typer.Option(
        "-k",
        metavar="EXPR",
        help="Cases to run, in pytest's -k syntax: 'moe and not seq'.",
        rich_help_panel=CASES,
        autocompletion=names_of_cases,
    ),
]


def selected_cases(expression: str | None) -> list[Case]:
    """Return the cases that a `-k` expression selects; all cases without an expression."""
    # Imported here, so that the error of a contradictory case is reported like any other.
    from bitproof.builtin_cases import all_cases

    return list(select(all_cases(), expression))
