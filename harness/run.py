"""One `bitproof run`, from the report folder to the exit status.

1. Make the run folder, so that an unwritable one is found before anything runs.
2. Say what will run and where the report goes.
3. Run the cases, showing progress.
4. Write the report, whatever happened: a case that did not finish is UNVERIFIED.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from harness.case import Case
from harness.compare.outcome import complete
from harness.errors import BitproofError, CaseError, UsageError
from harness.records import CaseResult, Report, Shard
from harness.report import terminal
from harness.report.progress import Progress, make_progress
from harness.report.status import error_status, exit_status, worst
from harness.report.write import is_reporting_rank, prepare_run_dir, write_run

if TYPE_CHECKING:
    from harness.run_options import RunOptions

INTERRUPTED = "interrupted before this case was finished"
NO_RESULT = "the launcher gave no result for this case"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a command line changes about every case that it selects. None leaves a case as it is."""

    reference: str | None = None
    candidate: str | None = None
    steps: int | None = None
    world_size: int | None = None
    data: str | None = None
    early_grad_accumulation: bool = False


@dataclass
class Progressing:
    """What a run knows so far; `reason` says why the cases without a result have none."""

    environment: dict[str, Any] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)
    reason: str = NO_RESULT
    status: int = 0
    failure: Exception | None = None


def change_case(case: Case, changes: Changes) -> Case:
    """The case with a command line's changes. Raises CaseError when they do not fit it."""
    values: dict[str, Any] = {
        name: value for name in ("reference", "candidate", "steps") if (value := getattr(changes, name)) is not None
    }
    if changes.world_size is not None:
        values["parallelism"] = replace(case.parallelism, world_size=changes.world_size)
    if changes.data is not None:
        values["batch"] = replace(case.batch, data=changes.data)
    if changes.early_grad_accumulation:
        if case.chunking is None:
            raise CaseError(
                f"case {case.name} does not chunk, so it has no gradients to accumulate early",
                expected="cases that chunk",
                found=f"case {case.name} with chunking=None",
                fix="leave it out with -k, or leave out --early-grad-accumulation",
            )
        values["chunking"] = replace(case.chunking, early_grad_accumulation=True)
    return replace(case, **values)


def named_case(cases: Sequence[Case], name: str, changes: Changes) -> Case:
    """The case of exactly that name, with a command line's changes. Raises UsageError when there is none."""
    for case in cases:
        if case.name == name:
            return change_case(case, changes)
    raise UsageError("no such case", expected=", ".join(case.name for case in cases), found=name)


def run_and_report(
    cases: Sequence[Case],
    options: RunOptions,
    report_dir: Path,
    replay: Sequence[str] = (),
    not_run: Mapping[str, str] = MappingProxyType({}),
    shard: Shard | None = None,
    tell: Callable[[Report, Path], None] = lambda report, run_dir: None,
) -> int:
    """Run cases, write their report and return the exit status.

    `not_run` says, by name, why cases were left out; `replay` are the command-line options that a replay
    must repeat; `shard` says of what selection the cases are one machine's part; `tell` is called with the written
    report and its folder. Raises UsageError when the call is wrong, before anything is run or written.
    """
    run_dir = prepare_run_dir(report_dir)
    reports = is_reporting_rank()
    if reports:
        names = ", ".join(case.name for case in cases)
        part = f"shard {shard}, " if shard else ""
        counted = f"{len(cases)} case{'s' if len(cases) != 1 else ''}" + (f" ({names})" if cases else "")
        print(f"bitproof: {part}{counted}, report in {run_dir}", flush=True)
    with _interrupt_on_terminate():
        progress = _run(cases, options, run_dir, reports)
        if isinstance(progress.failure, UsageError) and not progress.results:
            _remove_if_empty(run_dir)
            raise progress.failure
        with _interrupts_held():
            return _finish(cases, progress, options, run_dir, replay, not_run, shard, reports, tell)


def _run(cases: Sequence[Case], options: RunOptions, run_dir: Path, reports: bool) -> Progressing:
    """Run the cases until they end, fail or are interrupted."""
    from harness import launch

    state = Progressing()
    try:
        if reports:
            state.environment = launch.environment(options.device)
        show: Progress = make_progress(len(cases)) if reports else Silence()
        with show, _closing(launch.run_cases(cases, options, run_dir, show.on_event)) as results:
            for result in results:
                state.results.append(result)
                show.on_result(result)
    except (KeyboardInterrupt, SystemExit):  # the launcher turns SIGTERM into SystemExit
        state.reason = INTERRUPTED
    except BitproofError as error:
        state.reason, state.status, state.failure = str(error), error_status(error), error
    except Exception as error:  # our own bug: keep what was found out, then tell all
        state.reason, state.status, state.failure = traceback.format_exc(), 3, error
    return state


def _finish(
    cases: Sequence[Case],
    state: Progressing,
    options: RunOptions,
    run_dir: Path,
    replay: Sequence[str],
    not_run: Mapping[str, str],
    shard: Shard | None,
    reports: bool,
    tell: Callable[[Report, Path], None],
) -> int:
    """Write and print the report, on the rank that reports; return the exit status on all."""
    where = {
        "device": _join(result.device for result in state.results) or options.device,
        "backend": _join(result.backend for result in state.results) or "unknown",
    }
    results = complete(cases, state.results, state.reason, **where)
    status = worst([exit_status(results, is_shard=shard is not None), state.status])
    if not reports:
        _remove_if_empty(run_dir)
        return status
    report = Report(
        run_id=run_dir.name,
        exit_status=status,
        environment=state.environment | where,
        cases=results,
        options=tuple(replay),
        not_run=dict(not_run),
        remarks=options.remarks(),
        shard=shard,
    )
    write_run(report, run_dir)
    terminal.print_report(report)
    tell(report, run_dir)
    if state.reason == INTERRUPTED:
        print("bitproof: interrupted; the cases that were not finished are UNVERIFIED", file=sys.stderr)
    if state.failure is not None:
        print(state.reason, file=sys.stderr)
    print(f"report: {run_dir / 'report.md'}", flush=True)
    return status


class Silence:
    """The progress display of a rank that does not report."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def on_event(self, event: dict[str, Any]) -> None:
        """Show nothing."""

    def on_result(self, result: CaseResult) -> None:
        """Show nothing."""


@contextmanager
def _closing(results: Iterator[CaseResult]) -> Iterator[Iterator[CaseResult]]:
    """Close the launcher's generator however the loop ends: that is what stops its ranks."""
    try:
        yield results
    finally:
        if close := getattr(results, "close", None):
            close()


@contextmanager
def _interrupt_on_terminate() -> Iterator[None]:
    """Let SIGTERM, by which a CI system cancels a job, end a run as Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handlers({signal.SIGTERM: interrupt}):
        yield


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let nothing stop the writing of a report."""
    with _handlers({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextmanager
def _handlers(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Signal handlers for a while. Threads other than the main one have none to set."""
    try:
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _join(values: Iterable[str]) -> str:
    """Distinct values in order: `cpu`, or `cpu, cuda` for a run that used both."""
    return ", ".join(dict.fromkeys(values))


def _remove_if_empty(run_dir: Path) -> None:
    with suppress(OSError):
        run_dir.rmdir()
