"""`bitproof localize`: run a case, and write everything known about its first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Report
from bitproof.harness.report.story import render, story_lines

LOCALIZE_FILE = "localize.json"


def any_difference(case: Case) -> Case:
    """Return the case with its bounds and expected differences removed, so that any differing bit makes it
    DIFFERENT.
    """
    return replace(case, expected="EQUAL", differs=(), close_within=None, differs_within=None)


def localize(case: Case, options: RunOptions, report_dir: Path, replay: Sequence[str] = ()) -> int:
    """Run a case, print all facts about its first difference, and return the exit status.

    Whatever verdict the case expects, the status is 0 if every bit agrees, 1 if not, and 3 if the case could not be
    judged. `replay` has the options of the command that repeats the run.
    """

    def on_report(report: Report) -> dict[str, str]:
        [result] = report.cases
        print("\n".join(story_lines(result)), flush=True)
        return {LOCALIZE_FILE: render(result)}

    # A logged control also logs calls, so the search needs no replay for that.
    if options.control == "always":
        options = replace(options, control="logged")
    return run_and_report([any_difference(case)], options, report_dir, replay, on_report=on_report)
