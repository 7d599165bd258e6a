"""One `bitproof sensitivity`, from the report folder to the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.case import Case
from harness.compare.outcome import complete
from harness.execute.launch import environment
from harness.execute.sensing import Sensing, sense_apart
from harness.execute.transport import open_desk, refuse_torchrun
from harness.machine.devices import lease_gpus
from harness.options import RunOptions
from harness.program import interrupts
from harness.records import CaseResult, Report, Sensitivity
from harness.report import sensitivity as told
from harness.report.progress import make_progress
from harness.report.status import UNJUDGED, exit_status, worst
from harness.report.write import finish_run, prepare_run_dir

MARGIN = 300.0
"""Seconds that tracing, the replay of a step and the last calls may take beyond the time for calls."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of a case is tried: at most `sample` calls, for at most `seconds`; None for all, and for any time."""

    sample: int | None = None
    seconds: float | None = None


def sensitivity(
    cases: Sequence[Case], options: RunOptions, effort: Effort, report_dir: Path, replay: Sequence[str] = ()
) -> int:
    """Run cases, measure what their comparison sees, print and write it; return the exit status.

    That is a run's; and 3 where a case that is as expected could not be measured.
    """
    refuse_torchrun("sensitivity", "is no work for many ranks: it replays them all in one process")
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        print(f"bitproof: sensitivity of {len(cases)} cases, report in {run_dir}", flush=True)
        results: list[CaseResult] = []
        problem = ""
        try:
            with interrupts.let_in(), open_desk(cases, run_dir, options) as desk, make_progress(1) as progress:
                from harness.execute.case_run import CaseRun

                for case in cases:
                    placement = desk.place(case)
                    with lease_gpus(placement, case.parallelism.world_size):
                        run = CaseRun(case, placement, desk, options, progress.on_event)
                        result = run.result()
                    if result.as_expected:
                        log = run_dir / "logs" / case.name / "sensitivity.log"
                        found = _measured(case, run.recordings()["candidate"].resolve(), effort, log)
                        result = replace(result, sensitivity=found)
                    results.append(result)
                    print("\n".join([*told.tell(result), ""]), flush=True)
        except interrupts.STOPS:
            problem = "interrupted"
        interrupts.too_late()
        completed = complete(cases, results, problem, device=options.device, backend="unknown")
        status = worst([exit_status(completed), *(UNJUDGED for _ in filter(_is_missing, results))])
        report = Report(
            run_id=run_dir.name,
            exit_status=exit_status(completed),
            environment=environment(options.device),
            cases=completed,
            options=tuple(replay),
            remarks=options.remarks(),
        )
        return finish_run(report, run_dir, status)


def _measured(case: Case, recording: Path, effort: Effort, log: Path) -> Sensitivity:
    task = Sensing(case=case, recording=recording, sample=effort.sample, seconds=effort.seconds)
    timeout = float("inf") if effort.seconds is None else effort.seconds + MARGIN
    return sense_apart(task, log, timeout)


def _is_missing(result: CaseResult) -> bool:
    return result.as_expected and (result.sensitivity is None or result.sensitivity.share is None)
