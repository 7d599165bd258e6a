"""Run cases, record systems and compare recordings from Python, like the command line.

No torch is loaded into the caller's process, since ranks run in separate processes, and nothing is printed.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.errors import UsageError
from bitproof.harness.records import CaseResult, Divergence, Report, Verdict
from bitproof.keywords import RunSettings

if TYPE_CHECKING:
    import pandas as pd

    from bitproof.harness.changes import Changes
    from bitproof.harness.checks.check import Check
    from bitproof.harness.options import OnEvent, RunOptions
    from bitproof.harness.records import Comparison
    from bitproof.keywords import RecordSettings


@dataclass(frozen=True)
class Run:
    """A run of a case: its result, and the folder with its report, recordings and logs."""

    report: Report
    folder: Path

    @property
    def result(self) -> CaseResult:
        """The result of the case, as in the report."""
        return self.report.cases[0]

    @property
    def verdict(self) -> Verdict:
        """The outcome of the comparison."""
        return self.result.verdict

    @property
    def as_expected(self) -> bool:
        """Whether verdict and differences are the expected ones, no baseline drifted, and no check found a problem."""
        return self.result.as_expected

    @property
    def first_divergence(self) -> Divergence | None:
        """The first difference between the two systems, with the blamed call; None if they agree."""
        return self.result.first_divergence

    def assert_as_expected(self) -> Run:
        """Raise AssertionError, with the difference and the blamed call, unless the case got its expected verdict.

        Returns this run, so that a script may end in `print(bitproof.run(...).assert_as_expected())`.
        """
        __tracebackhide__ = True  # pytest shows the caller's line
        if not self.as_expected:
            raise AssertionError(str(self))
        return self

    def frame(self) -> pd.DataFrame:
        """The comparison as a DataFrame with a row per tensor.

        - Columns: step, rank, kind, name, both systems' digests, dtypes and shapes, and `equal`.
        - Values are missing if only one system recorded the tensor.

        Raises RecordingError if the run has no recordings of both systems, e.g. after an error.
        """
        from bitproof.frames import frame_of_run

        return frame_of_run(self.result, self.folder)

    def __str__(self) -> str:
        """Text with the verdict, the first difference, the blamed call, errors, and the command to repeat the run."""
        from bitproof.harness.report.terminal import case_lines
        from bitproof.harness.runtime.output import shown

        return shown("\n".join([*case_lines(self.report, self.result), f"  report: {self.folder / 'report.html'}"]))

    def _repr_html_(self) -> str:
        """HTML for a notebook: the verdict, the cause, and a link to the report."""
        from bitproof.harness.report import causes, text

        cells = "".join(
            f"<tr><th style='text-align:left;white-space:nowrap'>{html.escape(label)}</th>"
            f"<td style='text-align:left'>{html.escape(found)}</td></tr>"
            for label, found in causes.lines_of(self.result)
        )
        verdict = html.escape(f"{self.result.case.name}: {text.outcome(self.result)}")
        report = html.escape(str(self.folder / "report.html"))
        return f"<b>{verdict}</b><table>{cells}</table><a href='{report}'>{report}</a>"


def cases(expression: str | None = None) -> tuple[Case, ...]:
    """The cases of bitproof and of installed packages; with an expression, those that it selects.

    For example, `cases("moe and not seq")`. Raises UsageError if the expression is invalid, or if it selects nothing.
    """
    from bitproof.builtin_cases import all_cases
    from bitproof.harness.case.select import select

    return tuple(select(all_cases(), expression))


System = str | Callable[..., Any]
"""A system's name, or a factory: a function or class in a file."""


def run(
    case: Case | str | None = None,
    *,
    reference: System | None = None,
    candidate: System | None = None,
    args: Sequence[str] = (),
    report_dir: str | Path = "reports",
    on_event: OnEvent | None = None,
    **settings: Unpack[RunSettings],
) -> Run:
    """Run a case, given as a `Case`, by its name or by its JSON file, and write a run folder under `report_dir`.

    Without a case, two systems are compared: `reference` and `candidate`.

    - A system is a name, a factory, or a training script: "train.py", or with arguments, "train.py --fused".
    - A factory is a function or class of a file, which ranks find by file and name.
    - `reference="git:HEAD~1"` is the candidate's script in that revision.
    - `args`: further arguments for the scripts of both systems.
    - `settings`: the options of `bitproof run`, with `_` for `-`. `bitproof.keywords.RunSettings` has their types.
    - `on_event`: is called with each event of the run's progress.

    Returns the run, whatever its verdict: compare `verdict`, or call `assert_as_expected`. Raises UsageError if
    arguments or the case are wrong, before anything runs.

        run(reference="git:HEAD~1", candidate="train.py", args=["--steps", "5"])
    """
    from bitproof.harness.commands.scripts import is_script, script_sides

    if isinstance(candidate, str) and is_script(candidate):
        # The reference may be another script, `git:REF` or a system; `script_sides` gives both sides the arguments.
        old = _source(reference)
        reference, candidate = script_sides(candidate, old, args)
    elif args:
        raise UsageError("args are for scripts", expected='candidate="train.py"', found=f"candidate={candidate!r}")
    return run_asked(
        asked("run", RunSettings, case, reference, candidate, settings), report_dir, on_event or (lambda event: None)
    )


@dataclass(frozen=True)
class Asked:
    """A checked call of `bitproof.run` or a similar function.

    `given` is the case as the caller gave it, and `case` is that case with the `changes`.
    """

    given: Case | str
    case: Case
    changes: Changes
    options: RunOptions

    def replay(self, folder: Path) -> tuple[dict[str, str], tuple[str, ...]]:
        """The means to repeat this call on the command line.

        Returns the texts of files that must be written into `folder`, by name, and the options.
        """
        from bitproof.harness.settings import to_argv

        files, named = _files_of(self.given, self.options.names, folder)
        return files, (*to_argv(self.changes, self.options), *named)


def asked(
    name: str,
    taken: type[Any],
    case: Case | str | None,
    reference: System | None,
    candidate: System | None,
    settings: Mapping[str, Any],
) -> Asked:
    """Check the arguments of a call of the function `name`, and convert them.

    `taken` is the TypedDict of the function's keywords. Raises UsageError, or TypeError for an unknown keyword.
    """
    from bitproof.harness.changes import Changes, change_case
    from bitproof.harness.options import RunOptions
    from bitproof.keywords import read_settings

    _refuse_while_loading(name)
    sides = {"reference": _source(reference), "candidate": _source(candidate)}
    checks, settings, of_checks = _checks_of(settings) if name == "run" else ((), settings, [])
    changes, options = read_settings(name, taken, settings, Changes, RunOptions, of_checks)
    # The active checks are objects and no setting, so `read_settings` does not know them.
    options = replace(options, active=checks)
    chosen = _case_of(**sides) if case is None else find_case(case)
    if case is not None:
        # A given case may have other systems than its own; for two systems without a case, they are in the case
        # already.
        changes = replace(changes, reference=sides["reference"], candidate=sides["candidate"])
    return Asked(chosen if case is None else case, change_case(chosen, changes), changes, options)


def _checks_of(settings: Mapping[str, Any]) -> tuple[tuple[Check, ...], dict[str, Any], list[str]]:
    """Return the checks that the keywords of a call switch on, the keywords without the options of checks, and the
    names of these options.
    """
    from bitproof.harness.checks.shipped import active, all_checks
    from bitproof.harness.settings import checked, options_of

    given = dict(settings)
    asked = tuple(given.get("checks", ()))
    found = all_checks(asked)
    values: dict[str, Any] = {}
    for check in found:
        # Removed from `given`, because `read_settings` refuses keywords that it does not know.
        own = {each.keyword: given.pop(each.keyword) for each in options_of(check.Options) if each.keyword in given}
        values |= checked(check.Options, own)
    if asked:
        # A replay finds the checks again by file and name.
        given["checks"] = tuple(map(_source, asked))
    return active(found, values), given, [each.keyword for check in found for each in options_of(check.Options)]


def run_asked(
    call: Asked,
    report_dir: str | Path,
    on_event: OnEvent,
    more: Callable[[CaseResult], Mapping[str, str]] = lambda result: {},
) -> Run:
    """Run the case of a call, and write the run folder. `more` returns further files for it, as texts by name."""
    from bitproof.harness.commands.run import NO_RESULT
    from bitproof.harness.compare.outcome import complete
    from bitproof.harness.execute import launch
    from bitproof.harness.execute.checks.findings import prepare_all
    from bitproof.harness.report.status import exit_status
    from bitproof.harness.report.write import discard_if_bare, prepare_run_dir, write_run
    from bitproof.harness.runtime import launched

    changed, options = call.case, call.options
    folder = prepare_run_dir(Path(report_dir))
    try:
        environment = launch.environment(options.device)
        # The lines of checks are for a terminal, and this function prints nothing.
        for _ in prepare_all([changed], options, folder):
            pass
        found = list(launch.run_cases([changed], options, folder, on_event))
    # An interrupt leaves no empty folder, either.
    except BaseException:
        discard_if_bare(folder)
        raise
    where = {
        "device": found[0].device if found else options.device,
        "backend": found[0].backend if found else "unknown",
    }
    results = complete([changed], found, NO_RESULT)
    files, repeated = call.replay(folder)
    report = Report(
        run_id=folder.name,
        exit_status=exit_status(results),
        environment=environment | where,
        cases=results,
        options=repeated,
        remarks=options.remarks(),
    )
    # Under torchrun every rank runs the script; only the first writes the report.
    if launched.is_first():
        write_run(report, folder, files | dict(more(results[0])))
    else:
        discard_if_bare(folder)
    return Run(report, folder)


def _refuse_while_loading(name: str) -> None:
    from bitproof.harness.user_code.user_file import is_loading
    from bitproof.harness.within_user_code import refused

    # A rank loads the calling script, so each rank would start another run, without end.
    if is_loading():
        raise refused(
            UsageError(
                f"bitproof.{name} was called by a file while a rank loaded it",
                expected="a file whose loading only defines functions and classes",
                fix="call it below `if __name__ == '__main__':`, or in a test",
            )
        )


def _source(system: System | None) -> str | None:
    """The name of a system: for a factory, its file and name, `FILE.py:NAME`; None if `system` is None."""
    from bitproof.harness.user_code.user_object import source_of

    return system if system is None or isinstance(system, str) else source_of(system)


def _case_of(reference: str | None, candidate: str | None) -> Case:
    from bitproof.harness.commands.scripts import is_script, script_case

    if reference is not None and candidate is not None and is_script(candidate):
        return script_case(reference, candidate)
    if reference is None or candidate is None:
        raise UsageError(
            "without a case, a run compares two systems", expected="reference=... and candidate=..., or a case"
        )
    words = [re.sub("[^a-z0-9]+", "_", name.rpartition(":")[2].lower()).strip("_") for name in (reference, candidate)]
    # The name is a folder's name in the report, so it has only the characters that `Case` allows.
    name = "_against_".join(words) if words[0] != words[1] else words[0]
    family = Path(candidate.rpartition(":")[0] or candidate).stem
    # A user's systems need not have experts.
    parts = Parallelism(ep=1)
    return Case(name=f"own_{name}"[:100], family=family, reference=reference, candidate=candidate, parallelism=parts)


def _files_of(case: Case | str, names: Mapping[str, str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """The files and options with which a command uses the same case and the same mapping of names.

    Returns the texts of files to write into `folder`, by name, and the options that name these files.
    """
    from bitproof.harness.case.case_file import case_text
    from bitproof.harness.report.text import CASE_FILE
    from bitproof.harness.user_code.names import NamesInFile

    files, options = {}, []
    # Names in a file are repeated by the setting `names` itself.
    if names and not isinstance(names, NamesInFile):
        files["names.json"] = json.dumps(dict(names), indent=1) + "\n"
        options += ["--names", str(folder.absolute() / "names.json")]
    if isinstance(case, Case):
        files["case.json"] = case_text(case)
        options += [CASE_FILE, str(folder.absolute() / "case.json")]
    elif case.endswith(".json"):
        options += [CASE_FILE, str(Path(case).absolute())]
    return files, options


def assert_as_expected(run: Run) -> None:
    """Call `run.assert_as_expected()`."""
    __tracebackhide__ = True
    run.assert_as_expected()


def record(
    case: Case | str,
    system: System,
    out: str | Path,
    *,
    report_dir: str | Path = "reports",
    **settings: Unpack[RecordSettings],
) -> Path:
    """Record one system on a case into `out`, a folder that must not exist yet, and return `out`.

    - `settings`: the options of `bitproof record`, with `_` for `-`.
    - `report_dir`: for a run folder with logs.

    Raises UsageError if arguments are wrong, and RankError if the system fails.
    """
    from bitproof.harness.capture.selection import parse_values
    from bitproof.harness.changes import Changes, change_case
    from bitproof.harness.commands.record import record_to
    from bitproof.harness.options import RunOptions
    from bitproof.harness.report.write import discard_if_bare, prepare_run_dir
    from bitproof.keywords import RecordSettings, read_settings

    changes, options = read_settings("record", RecordSettings, settings, Changes, RunOptions)
    name = _source(system)
    assert name is not None
    chosen = change_case(find_case(case), changes)
    options = replace(options, values=parse_values(options.values))
    folder = prepare_run_dir(Path(report_dir))
    try:
        record_to(Path(out), chosen, name, options, folder)
    finally:
        discard_if_bare(folder)
    return Path(out)


def diff(first: str | Path, second: str | Path) -> Comparison:
    """Compare two recordings; returns a verdict, counts by kind, and the first record that differs.

    Raises UsageError if a path is not a folder, and RecordingError if a recording is damaged.
    """
    from bitproof.harness.commands.record import compare_recordings

    return compare_recordings(Path(first), Path(second))


def find_case(case: Case | str) -> Case:
    """Return the given case, or the case with this name or in this JSON file."""
    from bitproof.harness.case.case_file import read_case
    from bitproof.harness.changes import Changes, named_case

    if isinstance(case, Case):
        return case
    return read_case(Path(case), cases) if case.endswith(".json") else named_case(cases(), case, Changes())
