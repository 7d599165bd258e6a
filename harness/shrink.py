"""One `bitproof shrink`: from a failing case to the smallest that fails the same way, and what shows it.

1. Run the case as it is. One that does not fail, or differs from itself, is not shrunk.
2. Shrink it; tries run without controls, in a temporary folder.
3. Run what was found once more, each system twice.
4. Write the small case, a file of plain Python that shows the difference where there can be one, and a report.
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import __version__
from harness.case import Case
from harness.case_file import case_text
from harness.case_run import CaseRun
from harness.devices import lease_gpus
from harness.errors import BitproofError
from harness.launch import environment
from harness.localize.shrink_case import Budget, Symptom, Trial, differences, shrink, symptom_of
from harness.records import CaseResult, Report, Verdict
from harness.report.progress import make_progress
from harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED
from harness.report.text import CASE_FILE, blame, locate
from harness.report.write import prepare_run_dir, write_atomically, write_run
from harness.run_options import OnEvent, RunOptions
from harness.session import Session, open_session

FOLDER = "shrunk"
_ASK_SECONDS = 120.0
_FILE_SECONDS = 300.0


@dataclass
class _Desk:
    """A session's host, with folders of its own: for one of many runs of cases of one name."""

    session: Session
    run_dir: Path
    work: Path

    def ask(self, request: dict[str, Any], timeout: float, on_event: OnEvent) -> dict[str, Any]:
        return self.session.ask(request, timeout, on_event)


def shrink_and_report(case: Case, options: RunOptions, budget: Budget, report_dir: Path, replay: Sequence[str]) -> int:
    """Shrink a case; returns 1 when the small case differs, 0 when there is nothing to shrink, 3 for the rest.

    `replay` are the options that a run of the small case must repeat. Raises UsageError for a wrong call.
    """
    start = Trial(case, options.extra_passes, options.inject)
    start.check()
    run_dir = prepare_run_dir(report_dir)
    print(f"bitproof: shrink {case.name}, report in {run_dir}", flush=True)
    with open_session(run_dir, options) as session:
        return _Shrinking(session, run_dir, options, budget, tuple(replay)).run(start)


@dataclass
class _Shrinking:
    session: Session
    run_dir: Path
    options: RunOptions
    budget: Budget
    replay: tuple[str, ...]
    num_runs: int = 0

    def run(self, start: Trial) -> int:
        """All of it; returns the exit status."""
        first = self._watched(start, "when_different", "first")
        symptom = symptom_of(first)
        if symptom is None:
            return refuse(first)
        print(f"it fails: {symptom}", flush=True)
        start = replace(start, case=self._with_sizes(start.case))
        smallest = shrink(start, first, self._try, self.budget, lambda line: print(line, flush=True))
        if self.budget.is_spent:
            print(
                f"the budget is spent ({self.budget.spent} tries, {self.budget.elapsed:.0f} s): there may be a smaller"
            )
        final = self._watched(smallest, "always", "smallest")
        return self._finish(start, smallest, final, symptom)

    def _with_sizes(self, case: Case) -> Case:
        """The case with every size of its model stated; as it is where no model is known by its name."""
        try:
            sizes = self.session.ask({"request": "sizes", "case": case.to_dict()}, _ASK_SECONDS, lambda event: None)
        except BitproofError:
            return case
        return replace(case, model=replace(case.model, **sizes))

    def _try(self, trial: Trial) -> CaseResult:
        self.num_runs += 1
        folder = self.session.work / f"try{self.num_runs}"
        left = max(1.0, self.budget.seconds - self.budget.elapsed)
        options = replace(self.options, control="never", timeout=min(self.options.timeout, left))
        return self._run(trial, options, folder, folder, lambda event: None)

    def _watched(self, trial: Trial, control: Any, name: str) -> CaseResult:
        """A run whose progress is shown and whose logs and recordings stay."""
        with make_progress(1) as show:
            options = replace(self.options, control=control)
            result = self._run(trial, options, self.run_dir / name, self.session.work / name, show.on_event)
            show.on_result(result)
        return result

    def _run(self, trial: Trial, options: RunOptions, run_dir: Path, work: Path, on_event: OnEvent) -> CaseResult:
        options = replace(options, extra_passes=trial.extra_passes, inject=trial.inject)
        placement = self.session.place(trial.case)
        with lease_gpus(placement, trial.case.parallelism.world_size):
            desk = _Desk(self.session, run_dir, work)
            return CaseRun(trial.case, placement, desk, options, on_event).result()

    def _finish(self, start: Trial, smallest: Trial, final: CaseResult, symptom: Symptom) -> int:
        folder = self.run_dir / FOLDER
        folder.mkdir()
        case_file = folder / "case.json"
        write_atomically(case_file, case_text(smallest.case))
        options = self.replay + tuple(part for text in smallest.extra_passes for part in ("--extra-pass", text))
        options += (CASE_FILE, str(case_file))
        command = shlex.join(["bitproof", "run", *options])
        confirmed = symptom_of(final) == symptom
        status = UNJUDGED if not confirmed or final.verdict == Verdict.ERROR else UNEXPECTED
        file = self._write_file(smallest, final, folder, command) if confirmed else None
        where = {"device": final.device, "backend": final.backend}
        report = Report(
            run_id=self.run_dir.name,
            exit_status=status,
            environment=environment(self.options.device) | where,
            cases=[final],
            options=options,
        )
        write_run(report, self.run_dir)
        for line in _summarize(start, smallest, self.budget):
            print(line)
        print(f"it fails: {symptom}" if confirmed else f"once more it came to {final.verdict.value}: do not trust it")
        if file is not None:
            print(f"file:   {file}")
        print(f"replay: {command}\nreport: {self.run_dir / 'report.md'}", flush=True)
        return status

    def _write_file(self, trial: Trial, final: CaseResult, folder: Path, command: str) -> str:
        """The file of plain Python, in words: where it is and what running it showed, or why there is none."""
        case, first = trial.case, final.first_divergence
        if first is None:
            return "none: what fails is a run, and a file could only compare results"
        if trial.inject is not None:
            return "none: the difference is put in from outside of the two systems' code"
        if case.pipeline.backend != "fx":
            return f"none: what {case.pipeline.backend} compiles is not the graph's own code"
        request = {
            "request": "standalone",
            "case": case.to_dict(),
            "extra_passes": trial.extra_passes,
            "step": first.step,
            "head": _head(case, final, command),
        }
        print("writing a file that shows it, and running it", flush=True)
        try:
            found = self.session.ask(request, _FILE_SECONDS, lambda event: None)
        except BitproofError as error:
            return f"none: {error.what}" + (f"\n{error.found}" if error.found else "")
        file = folder / f"{case.name}.py"
        write_atomically(file, found["text"])
        calls = " and ".join(f"{number} of the {name}" for name, number in found["num_calls"].items())
        printed = "".join(f"\n          {line}" for line in found["printed"].splitlines())
        return f"{file}, {len(found['text'].splitlines())} lines, calls: {calls}; it exits with 1 and says{printed}"


def _head(case: Case, result: CaseResult, command: str) -> str:
    """What stands at the top of the file."""
    from importlib.metadata import version

    return f"""Two training steps that should agree in every bit, and do not: {case.name}, shrunk.

`reference` is a part of {case.reference}, `candidate` the same part of {case.candidate}: what is left of both after all
calls were taken out that do not matter. In the case, {locate(result.first_divergence)} differs first.
{blame(result.first_divergence) or "No single call is to blame."}

Run it: `python FILE` exits with 1 when the two differ, and with 0 when they agree. It needs torch alone.
Written by bitproof {__version__} with torch {version("torch")} and Python {platform.python_version()}.
The case itself: {command}"""


def refuse(result: CaseResult) -> int:
    """Say why there is nothing to shrink; returns the exit status."""
    reasons = {
        Verdict.NONDETERMINISTIC: ("a system differs from itself, so smaller cases would prove nothing", UNEXPECTED),
        Verdict.UNVERIFIED: ("the case could not be judged", UNJUDGED),
    }
    reason, status = reasons.get(result.verdict, ("the case does not fail", SUCCESS))
    print(f"nothing to shrink: {result.verdict.value}, {reason}", flush=True)
    if result.error:
        print(result.error, file=sys.stderr)
    return status


def _summarize(start: Trial, smallest: Trial, budget: Budget) -> list[str]:
    """From what to what, setting by setting, and what it took."""
    rows = [(name, str(was), str(now)) for name, was, now in differences(start, smallest)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"  {name.ljust(widths[0])}  {was.rjust(widths[1])} -> {now}" for name, was, now in rows]
    took = f"{budget.spent} tries, {budget.elapsed:.0f} s"
    return [f"shrunk in {took}:", *lines] if rows else [f"nothing could be left out: {took}"]
