"""Estimate how long a run will take, from earlier runs of the same cases in the report folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.errors import RecordingError
from bitproof.harness.report import json as report_json

MOST_REPORTS = 20
"""The number of reports to read, newest first."""

WORTH_PRINTING = 60.0
"""The shortest expected time, in seconds, for which an estimate is printed."""


def describe_expected_time(cases: Sequence[Case], replay: Sequence[str], report_dir: Path) -> str | None:
    """Return a line with the expected time of these cases; None if that time is short, or if too little is known.

    It is based on earlier runs with exactly the same options (`replay`). For each case, only its newest run counts.
    """
    # The seconds of a case by its name.
    known: dict[str, float] = {}
    # Names begin with the time, so the newest come first; `latest` is a link to one of them.
    run_dirs = sorted((path for path in report_dir.glob("*") if not path.is_symlink()), reverse=True)[:MOST_REPORTS]
    if len(cases) * max(map(_seconds_of_run, run_dirs), default=0.0) < WORTH_PRINTING:
        return None  # too short for an estimate: do not read the reports
    # A report that cannot be read is only an estimate less.
    for run_dir in run_dirs:
        with suppress(RecordingError):
            report = report_json.read(run_dir / report_json.FILE_NAME)
            for result in report.cases if report.options == tuple(replay) else ():
                if result.case in cases and result.seconds.total is not None:
                    # Newer reports were read before, and their times stay.
                    known.setdefault(result.case.name, result.seconds.total)
        if len(known) == len(cases):
            break
    seconds = sum(known.values())
    if seconds < WORTH_PRINTING:
        return None
    minutes = f"{seconds / 60:.0f} minutes" if seconds >= 90 else "a minute"
    if len(known) == len(cases):
        return f"expect about {minutes}, as these cases took here before"
    return f"expect more than {minutes}: so long {len(known)} of the {len(cases)} cases took here before"


def _seconds_of_run(run_dir: Path) -> float:
    """Return the seconds from a run's start to its report: infinite if the folder's name has no time, 0 if there is no
    report.
    """
    try:
        began = datetime.strptime(run_dir.name.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        lasted = (run_dir / report_json.FILE_NAME).stat().st_mtime - began
    except ValueError:
        return math.inf
    except OSError:  # no report, nothing to read
        return 0.0
    # A negative time means that the clock was changed or the folder copied: then the report must be read.
    return lasted if lasted >= 0 else math.inf
