"""`bitproof run`: run cases, compare, report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.case import Case
from bitproof.harness.case.select import asks_for
from bitproof.harness.changes import Changes, change_case
from bitproof.harness.checks.check import Check
from bitproof.harness.checks.shipped import all_checks, shipped_checks
from bitproof.harness.cli.app import CASES, Expression, app
from bitproof.harness.cli.arguments import CaseFiles, ReportDir, case_words, chosen_cases, find_case
from bitproof.harness.cli.completion import names_of_cases
from bitproof.harness.cli.declare import command, takes
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.commands.scripts import is_script, script_case, script_sides
from bitproof.harness.commands.shard import cases_of, parse_shard
from bitproof.harness.errors import UsageError
from bitproof.harness.machine.devices import unmet_requirement
from bitproof.harness.options import DeviceRequest, RunOptions
from bitproof.harness.settings import options_of, to_argv

_ALL = (*options_of(Changes), *options_of(RunOptions))
_OPTIONS = tuple(each.keyword for each in _ALL if each.keyword != "values")
"""Every setting, except the values that only a recording stores."""


def run_command(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CASE|SCRIPT",
            help="Cases of these names; or a training script to compare, as it is, with --reference: git:REF or "
            "another script. Its arguments, for both sides, come after --.",
            show_default=False,
            autocompletion=names_of_cases,
        ),
    ] = None,
    expression: Expression = None,
    case_files: CaseFiles = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="i/n",
            help="Run one of n parts of the selected cases; `merge` joins them.",
            rich_help_panel=CASES,
        ),
    ] = None,
    report_dir: ReportDir = Path("reports"),
    reference_args: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="More arguments for the reference's script.",
            rich_help_panel=CASES,
            show_default=False,
        ),
    ] = "",
    candidate_args: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="More arguments for the candidate's script.",
            rich_help_panel=CASES,
            show_default=False,
        ),
    ] = "",
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Run cases on every rank, compare, and write a report."""
    given = [*(script or [])]
    if given and all(word.endswith(".json") for word in given) and not case_files:
        # `bitproof run case.json` is `--case case.json`: files may then be combined with -k.
        given, case_files = [], [Path(word) for word in given]
    # The first word decides: cases by name, or a script with its arguments. Without words, --candidate may be a script.
    is_named = bool(given) and not given[0].endswith(".py")
    is_of_script = not is_named if given else is_script(changes.candidate) and not (expression or case_files)
    if given and (expression is not None or case_files):
        raise UsageError("cases are given twice", expected="cases, a script, -k or --case", found=shlex.join(given))
    if (reference_args or candidate_args) and not is_of_script:
        raise UsageError(
            "--reference-args and --candidate-args are for scripts",
            expected="bitproof run train.py --candidate-args=...",
        )
    if is_of_script:
        changes = _with_script_systems(given, changes, reference_args, candidate_args)
        cases = [change_case(script_case(str(changes.reference), str(changes.candidate)), changes)]
    elif is_named:
        if option := next((word for word in given if word.startswith("-")), None):
            raise UsageError(
                "words after -- are arguments of a script",
                expected=f"options of bitproof before --, or a script in place of {given[0]}",
                found=f"{given[0]} -- {option}",
            )
        # A name that is given twice runs once.
        cases = [find_case(name, changes) for name in dict.fromkeys(given)]
    else:
        cases = chosen_cases(expression, case_files, changes)
    # The shard is cut from the whole selection: each machine must cut it in the same way, whatever it can judge.
    part = None if shard is None else parse_shard(shard, cases)
    cases = cases if part is None else cases_of(part)
    # A user who names a case wants its verdict here, even UNVERIFIED; a wide selection skips it.
    not_run = {} if case_files or asks_for(expression) or given else _left_out(cases, options.device)
    left_out = tuple(case for case in cases if case.name in not_run)
    cases = [case for case in cases if case.name not in not_run]
    replay = [*to_argv(changes, options), *case_words(case_files)]
    raise typer.Exit(run_and_report(cases, options, report_dir, replay, not_run, part, left_out=left_out))


def _with_script_systems(words: list[str], changes: Changes, reference_args: str, candidate_args: str) -> Changes:
    """Return the changes, with the reference and the candidate set for a command line that names a script.

    `words` are the script and its arguments. Raises UsageError if the words do not begin with a script.
    """
    first, args = (words[0], words[1:]) if words else (str(changes.candidate), [])
    if words and changes.candidate is not None:
        raise UsageError("the candidate is given twice", expected="one script", found=f"{first}, {changes.candidate}")
    sides = script_sides(first, changes.reference, args, reference_args, candidate_args)
    return replace(changes, reference=sides[0], candidate=sides[1])


def declare(checks: Sequence[type[Check]]) -> None:
    """Add the command `run` to the program, with the options of these checks."""
    # `declare_asked` declares the command a second time, with more options.
    app.registered_commands[:] = [each for each in app.registered_commands if each.name != "run"]
    scripts = "bitproof run train.py --reference git:HEAD~1 --steps 5 -- --lr 3e-4"
    examples = scripts, "bitproof run -k moe_seq", "bitproof run --case case.json --steps 2 --control when-different"
    command("run", *examples)(takes(Changes, RunOptions, only=_OPTIONS, checks=checks)(run_command))


def declare_asked(words: Sequence[str]) -> None:
    """Declare `run` again, with the options of checks from installed packages and of checks that `--check` names in
    these words.
    """
    # Before the words are parsed, since parsing needs the checks' options. pytest does the same for `-p`.
    asked = [after for word, after in pairwise(words) if word == "--check"]
    asked += [word.partition("=")[2] for word in words if word.startswith("--check=")]
    declare(all_checks(asked))


# On import, so that help and completion show `run`; `declare_asked` replaces it when words are known.
declare(shipped_checks())


def _left_out(cases: list[Case], device: DeviceRequest) -> dict[str, str]:
    return {case.name: why for case in cases if (why := unmet_requirement(case, device))}
