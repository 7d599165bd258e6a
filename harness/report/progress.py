"""Show the progress of a run: live bars on a terminal, otherwise a line per event.

Without a terminal, a case's steps get a line at most every 5 seconds, so that logs stay readable.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from bitproof.harness.printable import one_line
from bitproof.harness.records import CaseResult, Event
from bitproof.harness.report import text
from bitproof.harness.runtime.output import SafeStream

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS_BETWEEN_STEP_LINES = 5.0
_MAX_ERROR = 200  # characters


class Progress(Protocol):
    """A display of a run's progress; a context manager around the run."""

    def __enter__(self) -> Self:
        """Start the display and return it."""

    def __exit__(self, *error: object) -> None:
        """Stop the display and restore the terminal."""

    def on_event(self, event: Event) -> None:
        """Show that a phase of a case begins, or that a step has ended."""

    def on_result(self, result: CaseResult) -> None:
        """Show the result of a finished case."""


def make_progress(num_cases: int, stream: TextIO | None = None) -> Progress:
    """Return the display for a stream (stdout by default): bars for a terminal, lines for anything else."""
    stream = stream or sys.stdout
    return LiveProgress(num_cases, stream) if stream.isatty() else PlainProgress(num_cases, stream)


PHASES = {"prepare": "trace and rewrite the graph", "prepared": "graph is ready", "start": "start ranks"}


def describe_event(event: Event) -> str:
    """Return an event as a phrase, e.g. `moe_seq graph (control): start ranks`."""
    arm = f" ({event.arm})" if event.arm != "first" else ""
    step = f"step {event.step + 1} of {event.steps}"
    what = step if event.event == "step" else PHASES.get(event.event, event.event)
    system = f" {event.system}" if event.system else ""
    return f"{event.case}{system}{arm}: {what}"


def describe_result(result: CaseResult) -> str:
    """Return a line about a finished case: `moe_seq: EQUAL in 3.2 s`."""
    verdict = text.outcome(result) + ("" if result.as_expected else f", expected {text.expectation(result)}")
    return f"{result.case.name}: {verdict} in {text.total_seconds(result):.1f} s"


def describe_error(result: CaseResult) -> str:
    """Return ": " followed by the first line of a case's error; an empty string if the case has no error."""
    # It is printed as soon as the case has finished, since the report may be much later.
    first = (result.error or "").partition("\n")[0]
    return f": {one_line(first)[:_MAX_ERROR]}" if first else ""


class PlainProgress:
    """A display that prints and flushes a line for each event. Lines about steps are limited to one every 5 s."""

    def __init__(self, num_cases: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_cases = num_cases
        self.stream = stream
        self.clock = clock
        self.started = clock()
        self.num_finished = 0
        self.last_step_line: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.flush()

    def on_event(self, event: Event) -> None:
        if event.event == "step":
            now = self.clock()
            # A fast case takes hundreds of steps per second.
            if now - self.last_step_line.get(event.case, self.started) < SECONDS_BETWEEN_STEP_LINES:
                return
            self.last_step_line[event.case] = now
        self._print(describe_event(event))

    def on_result(self, result: CaseResult) -> None:
        self.num_finished += 1
        count = f"({self.num_finished} of {self.num_cases} cases)"
        self._print(f"{describe_result(result)} {count}{describe_error(result)}")

    def _print(self, line: str) -> None:
        print(f"[{self.clock() - self.started:6.1f} s] {line}", file=self.stream, flush=True)


class LiveProgress:
    """A display with a bar for all cases and a bar for each running case."""

    def __init__(self, num_cases: int, stream: TextIO) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        from bitproof.harness.report.console import SafeConsole

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = RichProgress(*columns, console=SafeConsole(stream), transient=True)
        # The streams before rich replaces them, to recognize its own in `__enter__`.
        self.streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self.total = self.progress.add_task("cases", total=num_cases)
        self.current: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        for name in ("stdout", "stderr"):  # rich replaces them now, and would interpret markup in printed text
            if (stream := getattr(sys, name)) is not self.streams[name]:
                setattr(sys, name, SafeStream(stream))
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def on_event(self, event: Event) -> None:
        name = event.case
        # The total is unknown until the first step, so the bar only shows activity.
        if name not in self.current:
            self.current[name] = self.progress.add_task(name, total=None)
        self.progress.update(self.current[name], description=describe_event(event))
        if event.event == "step":
            self.progress.update(self.current[name], completed=event.step + 1, total=event.steps)

    def on_result(self, result: CaseResult) -> None:
        if result.case.name in self.current:
            self.progress.remove_task(self.current.pop(result.case.name))
        self.progress.advance(self.total)
        self.progress.console.print(describe_result(result) + describe_error(result))
