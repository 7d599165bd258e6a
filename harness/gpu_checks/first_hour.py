"""The first hour on GPUs, kept while it runs: `doctor --gpu` goes on where an earlier call was cut short.

    REPORT_DIR/doctor-gpu.json    every check: its result, what a failure means, its seconds; and on what it was tried
    REPORT_DIR/doctor-gpu.md      the same as a page, to send home

Both are written after each check. A call takes over what passed in an earlier one that did not reach its end, if
machine, libraries and code are the same; it tries again what failed or was not run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bitproof.harness.errors import RecordingError
from bitproof.harness.report.markdown_text import inline, table_of
from bitproof.harness.report.write import write_atomically
from bitproof.harness.validate import GROWING, parse, read

FILE, PAGE = "doctor-gpu.json", "doctor-gpu.md"
Outcome = Literal["pass", "FAIL", "NOT RUN"]

PLAN: dict[str, tuple[int, str]] = {
    "digests": (60, "recordings of this machine say nothing"),
    "attention": (30, "cases with attention are NONDETERMINISTIC"),
    "grouped products": (20, "cases with experts cannot be EQUAL"),
    "offload": (30, "cases that offload are noise"),
    "digest bandwidth": (20, "runs are slow; verdicts are right"),
    "sums in rank order": (90, "no case with buckets can be trusted"),
    "native sums": (90, "--collectives native may be DIFFERENT where nothing is wrong; the default is not affected"),
    "all-to-all": (60, "cases with experts cannot be EQUAL"),
    "a killed rank": (120, "a crash on this machine may name no rank, or a wrong one"),
    "a hung rank": (120, "a hang on this machine may name no rank, or a wrong one"),
    "transformer_batch": (600, "read its report as on a CPU, before any other case"),
    "moe_batch": (600, "read its report as on a CPU, before any other case with experts"),
    "moe_seq": (600, "read its report as on a CPU, before any other case with experts"),
}
"""Of each check, in order, the seconds that it is given in a plan, which no GPU has confirmed yet, and what a failure
means."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A check that was tried."""

    __pydantic_config__ = GROWING

    name: str
    outcome: Outcome
    found: str
    means: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FirstHour:
    """What was tried so far, and on what: `about` decides whether a later call may go on with it."""

    __pydantic_config__ = GROWING

    about: dict[str, str]
    is_over: bool = False
    tried: tuple[Tried, ...] = ()

    def plus(self, name: str, outcome: Outcome, found: str, seconds: float) -> FirstHour:
        """With one more check."""
        means = PLAN[name][1] if outcome == "FAIL" else ""
        new = Tried(name=name, outcome=outcome, found=found, means=means, seconds=round(seconds, 1))
        return dataclasses.replace(self, tried=(*self.tried, new))

    def write(self, report_dir: Path) -> None:
        """Write both files."""
        report_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(report_dir / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        write_atomically(report_dir / PAGE, self.page())

    def page(self) -> str:
        """The page to send home: where, each check in order, and what failures mean."""
        told = [f"- {inline(name)}: {inline(value)}" for name, value in self.about.items()]
        rows: list[tuple[str, ...]] = [
            (x.outcome, x.name, f"{x.seconds:g}", str(PLAN[x.name][0]), x.found, x.means) for x in self.tried
        ]
        reached = {x.name for x in self.tried}
        rows += [("not reached", name, "", str(PLAN[name][0]), "", "") for name in PLAN if name not in reached]
        table = table_of(["", "check", "seconds", "planned", "found", "a failure means"], rows)
        return "\n".join(["# doctor --gpu", "", *told, "", table, ""])


def earlier(report_dir: Path, about: Mapping[str, str]) -> tuple[Tried, ...]:
    """What passed in an earlier call that was cut short, on the same machine with the same code."""
    if not (report_dir / FILE).is_file():  # a pipe would block
        return ()
    try:
        found = read(FirstHour, parse((report_dir / FILE).read_text(encoding="utf-8")), FILE, RecordingError)
    except (OSError, ValueError, RecursionError, RecordingError):
        return ()
    if found.is_over or found.about != about:
        return ()
    return tuple(x for x in found.tried if x.outcome == "pass" and x.name in PLAN)
