"""`bitproof sensitivity`: run cases, measure and print their sensitivity, and return the exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.sensitivity.report import measured
from bitproof.harness.records import CaseResult, Report
from bitproof.harness.report import blocks
from bitproof.harness.report.status import UNJUDGED, worst


def sensitivity(cases: Sequence[Case], options: RunOptions, report_dir: Path, replay: Sequence[str] = ()) -> int:
    """Run cases, and print for each how many operator calls it would notice if they were off by 1 ULP.

    Returns the exit status of the run, or 3 if a successful case could not be measured. `replay` has the options of the
    command that repeats the run.
    """
    missing: list[CaseResult] = []

    def on_report(report: Report) -> Mapping[str, str]:
        missing.extend(filter(_is_missing, report.cases))
        for result in report.cases:
            found = result.checks.get("sensitivity")
            text = "\n".join(blocks.lines(found)) if found else "sensitivity not measured: the case is not as expected"
            print(f"{result.case.name}: {result.verdict}, {text}\n")
        return {}

    status = run_and_report(cases, options, report_dir, replay, on_report=on_report)
    return worst([status, *(UNJUDGED for _ in missing)])


def _is_missing(result: CaseResult) -> bool:
    found = measured(result)
    return result.as_expected and (found is None or found.share is None)
