"""`bitproof shrink`: finds the smallest case that fails in the same way, and writes files that reproduce the failure.

1. Run the case's first step. If it is not DIFFERENT, run the whole case. A case that does not fail, or with a system
   that differs from itself, is not shrunk.
2. Shrink the case. In each try, each system runs only once.
3. Run the smallest case again, each system twice.
4. Write the small case, a report and, if possible, a plain Python file that shows the difference.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from bitproof.harness.case import Case
from bitproof.harness.case.case import file_of, is_factory
from bitproof.harness.case.case_file import case_text
from bitproof.harness.compare.outcome import complete
from bitproof.harness.errors import BitproofError, RecordingError
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.launch import environment
from bitproof.harness.execute.requests import CallRequest, Request
from bitproof.harness.execute.session import Client
from bitproof.harness.execute.transport import open_client, refuse_torchrun
from bitproof.harness.machine.devices import Placement, lease_gpus
from bitproof.harness.options import OnEvent, RunOptions
from bitproof.harness.powers.shrink.copied_files import OwnFiles, own_files
from bitproof.harness.powers.shrink.records import Shrunk
from bitproof.harness.powers.shrink.shrink_case import Budget, Symptom, Trial, differences, shrink, symptom_of
from bitproof.harness.powers.shrink.shrunk_report import (
    describe_shrinking,
    own_systems_docstring,
    own_systems_script,
    reproducer_docstring,
)
from bitproof.harness.powers.shrink.standalone.own_systems import alone_text
from bitproof.harness.processes.command import CommandError, Ran, run_command
from bitproof.harness.records import CaseResult, Report, Verdict
from bitproof.harness.report.progress import make_progress
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED, exit_status
from bitproof.harness.report.text import CASE_FILE
from bitproof.harness.report.write import finish_run, prepare_run_dir, write_atomically
from bitproof.harness.runtime import interrupts

FOLDER = "shrunk"
A = TypeVar("A")

_IN_STAGE = "bitproof.harness.powers.shrink.in_stage"
_ASK_SECONDS = 120.0
_FILE_SECONDS = 300.0


@dataclass
class _FolderClient:
    """A client that stores each run in its own folders, because all runs of a search have the same case name.

    `run_dir` is for logs, and `work` for recordings.
    """

    client: Client
    run_dir: Path
    work: Path

    def place(self, case: Case) -> Placement:
        return self.client.place(case)

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        return self.client.ask(request, timeout, on_event)

    def announce(self, result: CaseResult) -> None:
        self.client.announce(result)


def shrink_and_report(
    case: Case, options: RunOptions, budget: Budget, report_dir: Path, replay: Sequence[str]
) -> Shrunk:
    """Shrink a case, then print, write and return the result.

    The exit status is 1 if the small case is DIFFERENT, otherwise 3. For a case that is not shrunk, see `refuse`.
    `replay` has the options of the command that repeats the run. Raises UsageError for wrong options.
    """
    refuse_torchrun("shrink", "tries fewer and fewer ranks, so it starts its own")
    start = Trial(case, options.extra_passes, options.inject)
    start.check()
    # Interrupts are let in only during the search, so a report is always written.
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        print(f"bitproof: shrink {case.name}, report in {run_dir}", flush=True)
        try:
            with interrupts.let_in(), open_client([case], run_dir, options) as client:
                return _Shrinking(client, run_dir, options, budget, tuple(replay)).run(start)
        except interrupts.STOPS:
            return _report_interrupted(case, options, run_dir)


@dataclass
class _Shrinking:
    """A search for the smallest case that fails in the same way, with its client, folder and options.

    With `logs_calls`, each try runs a single step, and logs its operator calls to find the call that differs first.
    """

    client: Client
    run_dir: Path
    options: RunOptions
    budget: Budget
    replay: tuple[str, ...]
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    logs_calls: bool = False

    def run(self, start: Trial) -> Shrunk:
        failing, first = self._first(start)
        symptom = symptom_of(first)
        if symptom is None:
            return Shrunk(exit_status=refuse(first), result=first)
        print(f"it fails: {symptom}", flush=True)
        # A size that only the model's flavor states could not shrink, so all sizes are stated in the case.
        start = replace(start, case=self._with_sizes(start.case))
        # The trial keeps its own number of steps: a single one if the first step differs.
        failing = replace(failing, case=replace(start.case, steps=failing.case.steps))
        smallest = shrink(failing, first, self._try, self.budget, lambda line: print(line, flush=True))
        if self.budget.is_spent:
            print(
                f"the budget is spent ({self.budget.spent} tries, {self.budget.elapsed:.0f} s): there may be a smaller"
            )
        # Tries ran without controls: this run shows that the smallest case is not noise.
        final = self._watched(smallest, "always", "smallest")
        return self._finish(start, smallest, final, symptom)

    def _first(self, start: Trial) -> tuple[Trial, CaseResult]:
        # First a single step: if it differs, more steps would begin with the same difference.
        if start.inject is None:  # a fault may apply at a later step, and is refused if it never can
            short = replace(start, case=replace(start.case, steps=1))
            result = self._watched(short, "up_to_difference", "first_step", logs_calls=True)
            if result.verdict == Verdict.DIFFERENT:
                # The logs suffice to find the symptom, which does not depend on the tensors' bits.
                self.logs_calls = True
                return short, result
        return start, self._watched(start, "up_to_difference", "first")

    def _with_sizes(self, case: Case) -> Case:
        try:
            sizes: dict[str, Any] = self._call_in_stage(case, "model_sizes", _ASK_SECONDS)
        except BitproofError:
            # Sizes that the case does not state stay as they are: the result is only less small.
            return case
        return replace(case, model=replace(case.model, **sizes))

    def _call_in_stage(
        self, case: Case, function: str, seconds: float, values: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        source = f"{_IN_STAGE}:{function}"
        return self.client.ask(CallRequest(case=case, function=source, values=dict(values)), seconds).values

    def _try(self, trial: Trial) -> CaseResult:
        folder = self.client.work / f"try{next(self.numbers)}"
        # A try may not take longer than the rest of the budget.
        left = max(1.0, self.budget.seconds - self.budget.elapsed)
        options = replace(self.options, control="never", timeout=min(self.options.timeout, left))
        return self._run(trial, options, folder, folder, lambda event: None, self.logs_calls)

    def _watched(self, trial: Trial, control: Any, name: str, *, logs_calls: bool = False) -> CaseResult:
        with make_progress(1) as show:
            options = replace(self.options, control=control)
            folders = self.run_dir / name, self.client.work / name
            result = self._run(trial, options, *folders, show.on_event, logs_calls)
            show.on_result(result)
        return result

    def _run(
        self,
        trial: Trial,
        options: RunOptions,
        run_dir: Path,
        work: Path,
        on_event: OnEvent,
        logs_calls: bool,
    ) -> CaseResult:
        # The trial's own passes, since shrinking may have removed some.
        options = replace(options, extra_passes=trial.extra_passes, inject=trial.inject)
        placement = self.client.place(trial.case)
        with lease_gpus(placement, trial.case.parallelism.world_size):
            client = _FolderClient(self.client, run_dir, work)
            return CaseRun(trial.case, placement, client, options, on_event, logs_calls=logs_calls).result()

    def _finish(self, start: Trial, smallest: Trial, final: CaseResult, symptom: Symptom) -> Shrunk:
        # If the last run, with controls, fails in another way, the case is written all the same, but not trusted.
        confirmed = symptom_of(final) == symptom
        # An ERROR fails in the same way, but shows no difference of bits.
        status = UNJUDGED if not confirmed or final.verdict == Verdict.ERROR else UNEXPECTED
        for line in describe_shrinking(differences(start, smallest), self.budget.spent, self.budget.elapsed):
            print(line)
        print(f"it fails: {symptom}" if confirmed else f"the confirming run was {final.verdict.value}: do not trust it")
        folder = self.run_dir / FOLDER
        case_file = folder / "case.json"
        # Shrinking may have removed passes, so they are named here, and not in `replay`.
        options = self.replay + tuple(part for text in smallest.extra_passes for part in ("--extra-pass", text))
        options += (CASE_FILE, str(case_file))
        command = shlex.join(["bitproof", "run", *options])
        file = None
        try:
            folder.mkdir()
            write_atomically(case_file, case_text(smallest.case))
            if confirmed:
                file, text = self._write_file(smallest, final, folder, command)
                print(f"file:   {text}")
        except OSError as error:
            raise RecordingError(
                "the small case cannot be written", found=error.strerror or str(error), where=str(folder)
            ) from error
        where = {"device": final.device, "backend": final.backend}
        report = Report(
            run_id=self.run_dir.name,
            exit_status=status,
            environment=environment(self.options.device) | where,
            cases=[final],
            options=options,
            remarks=replace(self.options, control="up_to_difference").remarks(),
        )
        print(f"replay: {command}", flush=True)
        interrupts.too_late()
        return Shrunk(
            exit_status=finish_run(report, self.run_dir, status),
            result=final,
            symptom=str(symptom) if confirmed else None,
            extra_passes=smallest.extra_passes,
            case_file=case_file,
            file=file,
        )

    def _write_file(self, trial: Trial, final: CaseResult, folder: Path, command: str) -> tuple[Path | None, str]:
        """Write a plain Python file that shows the difference. Return a pair: the file's path, and a text about the
        file with its output.

        If there can be no such file, the pair is None and a text with the reason.
        """
        case, first = trial.case, final.first_divergence
        if first is None:
            return None, "none: what fails is a run, and a file could only compare results"
        if why := why_no_file(trial, final):
            return None, f"none: {why}"
        if is_factory(case.reference):
            return _write_own_systems(folder / f"{case.name}.py", trial, final, command, bool(self.options.names))
        print("writing a file that shows it, and running it", flush=True)
        try:
            head = reproducer_docstring(case, final, command)
            values = {"extra_passes": trial.extra_passes, "step": first.step, "head": head}
            # In another process, since this one never imports torch.
            found = self._call_in_stage(case, "write_file", _FILE_SECONDS, values)
        except BitproofError as error:
            return None, f"none: {error.what}" + (f"\n{error.found}" if error.found else "")
        file = folder / f"{case.name}.py"
        text = found["text"]
        write_atomically(file, text)
        calls = " and ".join(f"{number} of the {name}" for name, number in found["num_calls"].items())
        printed = "".join(f"\n          {line}" for line in found["printed"].splitlines())
        sentence = f"{file}, {len(text.splitlines())} lines, calls: {calls}; it exits with 1 and says{printed}"
        return file, sentence


def _write_own_systems(
    file: Path, trial: Trial, final: CaseResult, command: str, maps_names: bool
) -> tuple[Path | None, str]:
    """Write a Python file that contains or loads a user's two systems and shows their difference.

    Return a pair: the file's path, and a text about the file. If there can be no such file, the pair is None and a text
    with the reason.
    """
    # Three forms, until one shows the difference: the systems' code without bitproof, the code with bitproof, and a
    # file that loads the systems from their folder.
    case = trial.case

    def script_of(own: OwnFiles) -> str:
        return own_systems_script(case, final, command, trial.extra_passes, *own)

    sources = (trial.case.reference, trial.case.candidate, *trial.extra_passes)
    files = {source: file_of(source.rpartition(":")[0]) for source in sources if is_factory(source)}
    try:
        own = own_files({source: file for source, file in files.items() if file is not None})
    except (OSError, SyntaxError):
        own = OwnFiles({}, {}, [])
    # A file without bitproof has only the two systems: no passes, no GPU, and no mapped names.
    if {case.reference, case.candidate} == own.names.keys() and final.device == "cpu" and not maps_names:
        needs = [package for package in own.needs if not package.startswith("bitproof ")]
        found = run_own_systems(
            file, alone_text(own_systems_docstring(case, final, command, ", ".join(needs)), case, own)
        )
        if found[0] is not None:
            return found
        print("without bitproof it shows no difference: writing one that needs it")
    found = run_own_systems(file, script_of(own))
    if found[0] is not None or not own.texts:
        return found
    print("without the folder that the systems lie in it shows no difference: writing one that names the folder")
    return run_own_systems(file, script_of(OwnFiles({}, {}, [])))


def run_own_systems(file: Path, text: str) -> tuple[Path | None, str]:
    """Write and run a file with a user's two systems. Return a pair: the file's path, and a text about the file with
    its output.

    If the file shows no difference, it is removed, and the pair is None and a text with the reason.
    """
    print("writing a file that shows it, and running it", flush=True)
    write_atomically(file, text)
    with tempfile.TemporaryDirectory() as elsewhere:  # its own report goes here
        try:
            done = run_command(
                [sys.executable, str(file.resolve())], _FILE_SECONDS, folder=Path(elsewhere), is_joined=True
            )
        except CommandError as error:
            done = Ran(-1, str(error), "")
    # A file that shows a difference exits with 1.
    if done.status != UNEXPECTED:
        file.unlink()
        return None, f"none: one was written, and ran without showing a difference\n{done.out}"
    # Lines about the temporary report would name a folder that is gone.
    printed = "".join(f"\n          {line}" for line in done.out.splitlines() if elsewhere not in line)
    return file, f"{file}, {len(text.splitlines())} lines; it exits with 1 and says{printed}"


def why_no_file(trial: Trial, final: CaseResult) -> str | None:
    if trial.inject is not None:
        return "the difference is put in from outside of the two systems' code"
    if trial.case.pipeline.compiles:
        return f"what {trial.case.pipeline.backend} compiles is not the graph's own code"
    if final.device != "cpu":
        return f"it fails on {final.device}, and a file runs on the CPU, by other operators"
    return None


def _report_interrupted(case: Case, options: RunOptions, run_dir: Path) -> Shrunk:
    # First, so that a further interrupt cannot stop the report.
    interrupts.too_late()
    where = {"device": options.device, "backend": "unknown"}
    results = complete([case], [], "interrupted before the case was shrunk")
    report = Report(
        run_id=run_dir.name,
        exit_status=exit_status(results),
        environment=environment(options.device) | where,
        cases=results,
        options=tuple(part for text in options.extra_passes for part in ("--extra-pass", text)),
    )
    print(f"{interrupts.MESSAGE}; the case was not shrunk", file=sys.stderr)
    return Shrunk(exit_status=finish_run(report, run_dir, report.exit_status))


def refuse(result: CaseResult) -> int:
    """Print why there is nothing to shrink, and return the exit status.

    It is 0 if the case does not fail, 1 if a system differs from itself, and 3 if the case could not be judged.
    """
    reasons = {
        Verdict.NONDETERMINISTIC: ("a system differs from itself, so smaller cases would prove nothing", UNEXPECTED),
        Verdict.UNVERIFIED: ("the case could not be judged", UNJUDGED),
    }
    reason, status = reasons.get(result.verdict, ("the case does not fail", SUCCESS))
    print(f"nothing to shrink: {result.verdict.value}, {reason}", flush=True)
    if result.error:
        print(result.error, file=sys.stderr)
    return status
