"""`bitproof run`: run cases, and write their report.

1. Create the run folder; if it cannot be written, nothing is run.
2. Print the cases and the report's path.
3. Run the cases, showing progress.
4. Print the verdicts, then write the report, even after an error or an interrupt: a case that did not finish is
   UNVERIFIED.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bitproof.harness.case import Case
from bitproof.harness.checks.power_modules import power_module
from bitproof.harness.commands.expected_time import describe_expected_time
from bitproof.harness.compare.outcome import complete
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.machine.devices import unmet_requirement
from bitproof.harness.records import CaseResult, Event, Report, Shard
from bitproof.harness.report import terminal
from bitproof.harness.report.progress import Progress, make_progress
from bitproof.harness.report.status import error_status, exit_status, worst
from bitproof.harness.report.write import discard_if_bare, finish_run, prepare_run_dir, warm_up
from bitproof.harness.runtime import interrupts, launched
from bitproof.harness.torch_versions import torch_version, warning_of

if TYPE_CHECKING:
    from bitproof.harness.options import RunOptions

INTERRUPTED = "interrupted before this case was finished"
NO_RESULT = "the launcher gave no result for this case"


@dataclass
class RunState:
    """The state of a run: its results so far, and how it ended.

    - `reason`: why some cases have no result.
    - `failure`: the error that ended the run.
    - `status`: the exit status for that error.
    - `reports`: whether this process writes the report.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)
    reason: str = NO_RESULT
    status: int = 0
    failure: Exception | None = None
    reports: bool = True


def run_and_report(
    cases: Sequence[Case],
    options: RunOptions,
    report_dir: Path,
    replay: Sequence[str] = (),
    not_run: Mapping[str, str] = MappingProxyType({}),
    shard: Shard | None = None,
    on_report: Callable[[Report], Mapping[str, str]] = lambda report: {},
    left_out: Sequence[Case] = (),
) -> int:
    """Run cases, write their report and return the exit status.

    - `replay`: the options for a command that repeats the run.
    - `left_out`: selected cases that this machine cannot judge, which are not run. `not_run` maps their names to the
      reasons.
    - `shard`: the part of a selection that consists of `cases` and `left_out`; None if they are the whole selection.
    - `on_report`: prints more about the report, and returns further files to write next to it, as texts by name.

    Raises UsageError if options or cases are wrong, before anything is run or written.
    """
    # Interrupts are held back except while cases run (`let_in`), so that a report is written whole or not at all.
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        reports = launched.is_first()
        if reports:
            names = ", ".join(case.name for case in cases)
            part = f"shard {shard}, " if shard else ""
            counted = f"{len(cases)} case{'s' if len(cases) != 1 else ''}" + (f" ({names})" if cases else "")
            print(f"bitproof: {part}{counted}, report in {run_dir}", flush=True)
            if warning := warning_of(torch_version()):
                print(warning, flush=True)
            if expected := describe_expected_time(cases, replay, report_dir):
                print(expected, flush=True)
            _print_unmet_requirements(cases, options)
            _print_concurrency(cases, options)
        progress = _run(cases, options, run_dir, reports)
        # Nothing ran, so no folder should remain.
        if isinstance(progress.failure, UsageError) and not progress.results:
            discard_if_bare(run_dir)
            raise progress.failure
        # From here on the report is written, and the exit status must match it.
        interrupts.too_late()
        return _finish(cases, progress, options, run_dir, replay, not_run, left_out, shard, on_report)


def _print_unmet_requirements(cases: Sequence[Case], options: RunOptions) -> None:
    for case in cases:
        with suppress(UsageError):  # a wrong call is refused later, with its report
            if why := unmet_requirement(case, options.device):
                print(f"{case.name} was asked for and cannot be judged here: {why}; it runs all the same", flush=True)


def _print_concurrency(cases: Sequence[Case], options: RunOptions) -> None:
    if options.jobs == 1:
        return
    with suppress(UsageError):
        # A wrong option is refused when the cases run, and then reported.
        plan = power_module("side_by_side.concurrency").plan_concurrency(cases, options)
        if plan.num_cases > 1:
            print(plan, flush=True)


def _run(cases: Sequence[Case], options: RunOptions, run_dir: Path, reports: bool) -> RunState:
    from bitproof.harness.execute import launch

    state = RunState()
    try:
        if options.active:
            from bitproof.harness.execute.checks.findings import prepare_all

            with interrupts.let_in(), _closing(prepare_all(cases, options, run_dir)) as lines:
                for line in lines:
                    if reports:  # torchrun's other ranks print nothing
                        print(line, flush=True)
        show: Progress = make_progress(len(cases)) if reports else Silence()
        with (
            interrupts.let_in(),
            show,
            _closing(launch.run_cases(cases, options, run_dir, show.on_event)) as results,
        ):
            if reports:  # while the host imports torch: after the verdict nothing shall be waited for
                state.environment = launch.environment(options.device)
                terminal.warm_up()
                warm_up()
            for result in results:
                state.results.append(result)
                show.on_result(result)
    except interrupts.STOPS:
        state.reason = INTERRUPTED
    except BitproofError as error:
        state.reason, state.status, state.failure = str(error), error_status(error), error
    except Exception as error:  # our own bug: keep the results so far, then show the traceback
        state.reason, state.status, state.failure = traceback.format_exc(), 3, error
    # If rank 0 is lost, the first rank of each other machine reports in its place.
    state.reports = reports or (state.failure is not None and launched.reports_for_rank_0())
    if state.reports and not state.environment:
        state.environment = launch.environment(options.device)
    return state


def _finish(
    cases: Sequence[Case],
    state: RunState,
    options: RunOptions,
    run_dir: Path,
    replay: Sequence[str],
    not_run: Mapping[str, str],
    left_out: Sequence[Case],
    shard: Shard | None,
    on_report: Callable[[Report], Mapping[str, str]],
) -> int:
    # A run may place its cases on several devices, so this comes from the results; a run without results has only the
    # request.
    where = {
        "device": _distinct(result.device for result in state.results) or options.device,
        "backend": _distinct(result.backend for result in state.results) or "unknown",
    }
    # Cases without a result become UNVERIFIED, so that an interrupted run never looks complete.
    results = complete(cases, state.results, state.reason)
    status = worst([exit_status(results, is_shard=shard is not None), state.status])
    if not state.reports:
        discard_if_bare(run_dir)
        return status
    report = Report(
        run_id=run_dir.name,
        exit_status=status,
        environment=state.environment | where,
        cases=results,
        options=tuple(replay),
        not_run=dict(not_run),
        # The selection of a shard has these cases already.
        left_out=() if shard else tuple(left_out),
        remarks=options.remarks(),
        shard=shard,
    )
    # The verdicts are printed before the report is written: a full disk must not hide them.
    terminal.print_report(report)
    more = on_report(report)
    if state.reason == INTERRUPTED:
        print(f"{interrupts.MESSAGE}; the cases that were not finished are UNVERIFIED", file=sys.stderr)
    if state.failure is not None and launched.is_first():  # other ranks have reported the loss of rank 0
        print(state.reason, file=sys.stderr)
    return finish_run(report, run_dir, status, more)


class Silence:
    """A progress display that shows nothing, for ranks that do not print."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def on_event(self, event: Event) -> None:
        """Show nothing."""

    def on_result(self, result: CaseResult) -> None:
        """Show nothing."""


T = TypeVar("T")


@contextmanager
def _closing(results: Iterator[T]) -> Iterator[Iterator[T]]:
    try:
        yield results
    finally:
        # Closing the generator ends the ranks that it started.
        if close := getattr(results, "close", None):
            close()


def _distinct(values: Iterable[str]) -> str:
    """Return the distinct values in order, joined into a text: `cpu`, or `cpu, cuda` if a run used both devices."""
    return ", ".join(dict.fromkeys(values))
