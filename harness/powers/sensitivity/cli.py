"""`bitproof sensitivity`: count the operator calls of a step that a case would notice if they were off by 1 ULP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bitproof.harness.changes import Changes
from bitproof.harness.cli.app import Expression
from bitproof.harness.cli.arguments import ONE_CASE, CaseFiles, ReportDir, case_words, chosen_cases, refuse_seconds
from bitproof.harness.cli.declare import JUDGED, command, takes
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.sensitivity.check import SensitivityCheck, SensitivityOptions
from bitproof.harness.powers.sensitivity.records import Effort
from bitproof.harness.settings import TIME, to_argv

MAIN_CASES = ("transformer_batch", "moe_batch", "moe_seq")
"""The cases that are measured if none is selected."""

_OPTIONS = (*ONE_CASE, "early_grad_accumulation", "observe", "every_call", "no_kept_graph", "timeout")


@command(
    "sensitivity",
    "bitproof sensitivity -k moe_seq --sample 200",
    "bitproof sensitivity --case case.json",
    brief="Count the operator calls that a case would notice.",
    statuses=(JUDGED[0], JUDGED[1], "a case could not be judged or measured"),
)
@takes(Changes, RunOptions, only=_OPTIONS, says={"timeout": "Time limit of a case's run."})
def sensitivity_command(
    expression: Expression = None,
    case_files: CaseFiles = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Try N calls, drawn by the case's seed, instead of all.",
            rich_help_panel=TIME,
        ),
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            min=0,
            callback=refuse_seconds,
            metavar="SECONDS",
            help="Stop after this time per case; the calls tried are a random sample. 0: try all.",
            rich_help_panel=TIME,
        ),
    ] = 600.0,
    report_dir: ReportDir = Path("reports"),
    *,
    changes: Changes,
    options: RunOptions,
) -> None:
    """Make each call of a step wrong by one ULP, one at a time, and report which a case would notice."""
    from bitproof.harness.powers.sensitivity.command import sensitivity

    cases = chosen_cases(expression, case_files, changes, MAIN_CASES)
    check = SensitivityCheck(SensitivityOptions(Effort(sample=sample, seconds=limit or None)))
    options = replace(options, device="cpu", control="never", active=(check,))
    raise typer.Exit(sensitivity(cases, options, report_dir, [*to_argv(changes, options), *case_words(case_files)]))
