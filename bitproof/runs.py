"""Run cases, record systems and compare recordings from Python, as the command line does.

Nothing here loads torch into the caller's process: ranks run in processes of their own. Nothing prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bitproof.harness.case import Case
from bitproof.harness.records import CaseResult, Divergence, Report, Verdict

if TYPE_CHECKING:
    from bitproof.harness.compare.verdict import Comparison
    from bitproof.harness.options import OnEvent

Device = Literal["auto", "cpu", "cuda"]
Collectives = Literal["auto", "shared", "gloo", "native"]
Control = Literal["always", "when_different", "never"]


@dataclass(frozen=True)
class Run:
    """One case's run: what came of it, and the folder with its report, recordings and logs."""

    report: Report
    folder: Path

    @property
    def result(self) -> CaseResult:
        """The case's line of the report."""
        return self.report.cases[0]

    @property
    def verdict(self) -> Verdict:
        """What the comparison came to."""
        return self.result.verdict

    @property
    def as_expected(self) -> bool:
        """Whether the case got the verdict that it states, in the kinds that it states."""
        return self.result.as_expected

    @property
    def first_divergence(self) -> Divergence | None:
        """Where the two systems first part, and the call to blame; None where they do not."""
        return self.result.first_divergence

    def __str__(self) -> str:
        """The verdict, where the systems first part, the call to blame, what failed, and the replaying command."""
        from bitproof.harness.program.output import shown
        from bitproof.harness.report.terminal import tell_case

        return shown("\n".join([*tell_case(self.report, self.result), f"  report: {self.folder / 'report.html'}"]))


def cases(expression: str | None = None) -> tuple[Case, ...]:
    """The cases that bitproof and installed distributions bring, or those that a `-k` expression selects.

    Raises UsageError for what is no expression, or selects nothing.
    """
    from bitproof.builtin_cases import all_cases
    from bitproof.harness.case.select import select

    return tuple(select(all_cases(), expression))


def run(
    case: Case | str,
    *,
    reference: str | None = None,
    candidate: str | None = None,
    steps: int | None = None,
    world_size: int | None = None,
    data: str | Path | None = None,
    early_grad_accumulation: bool = False,
    observe: Sequence[str] = (),
    device: Device = "auto",
    share_gpus: bool = False,
    collectives: Collectives = "auto",
    control: Control = "always",
    inject: str | None = None,
    extra_passes: Sequence[str] = (),
    every_call: bool = False,
    names: Mapping[str, str] | None = None,
    precompiled: str | Path | None = None,
    trust_compiled: bool = False,
    timeout: float = 600.0,
    report_dir: str | Path = "reports",
    on_event: OnEvent | None = None,
) -> Run:
    """Run a case, given whole or by its name, and write its run folder under `report_dir`.

    `reference` to `observe` change the case; they and the others mean what the options of `bitproof
    run` do. `timeout` is in seconds. `on_event` is called with progress. Returns whatever came of it: compare
    `verdict`, or call `assert_as_expected`. Raises UsageError for a call or a case that is wrong, before anything runs.
    """
    from bitproof.harness.commands.run import NO_RESULT, Changes, change_case, check_data, replay_options
    from bitproof.harness.compare.outcome import complete
    from bitproof.harness.execute import launch
    from bitproof.harness.options import RunOptions
    from bitproof.harness.program import launched
    from bitproof.harness.report.status import exit_status
    from bitproof.harness.report.write import discard_if_bare, prepare_run_dir, write_run

    changes = Changes(
        reference=reference,
        candidate=candidate,
        steps=steps,
        world_size=world_size,
        data=check_data(data),
        early_grad_accumulation=early_grad_accumulation,
        observe=tuple(observe),
    )
    chosen = _find(case)
    changed = change_case(chosen, changes)
    options = RunOptions(
        device=device,
        share_gpus=share_gpus,
        collectives=collectives,
        timeout=timeout,
        control=control,
        inject=inject,
        extra_passes=tuple(extra_passes),
        every_call=every_call,
        names=names or {},
        precompiled=None if precompiled is None else Path(precompiled),
        trust_compiled=trust_compiled,
    )
    folder = prepare_run_dir(Path(report_dir))
    try:
        environment = launch.environment(options.device)
        found = list(launch.run_cases([changed], options, folder, on_event or (lambda event: None)))
    except BaseException:
        discard_if_bare(folder)
        raise
    where = {
        "device": found[0].device if found else options.device,
        "backend": found[0].backend if found else "unknown",
    }
    results = complete([changed], found, NO_RESULT)
    files, named = _files_of(case, options.names, folder)
    report = Report(
        run_id=folder.name,
        exit_status=exit_status(results),
        environment=environment | where,
        cases=results,
        options=(*replay_options(changes, options), *named),
        remarks=options.remarks(),
    )
    if launched.is_first():
        write_run(report, folder, files)
    else:
        discard_if_bare(folder)
    return Run(report, folder)


def _files_of(case: Case | str, names: Mapping[str, str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """What a replay from the command line needs beside its options: files of the run folder, and what names them."""
    from bitproof.harness.case.case_file import case_text
    from bitproof.harness.report.text import CASE_FILE

    files, options = {}, []
    if names:
        files["names.json"] = json.dumps(dict(names), indent=1) + "\n"
        options += ["--names", str(folder / "names.json")]
    if isinstance(case, Case):
        files["case.json"] = case_text(case)
        options += [CASE_FILE, str(folder / "case.json")]
    return files, options


def assert_as_expected(run: Run) -> None:
    """Raise AssertionError, with the divergence and the call to blame, unless a case got the verdict that it states."""
    if not run.as_expected:
        raise AssertionError(str(run))


def record(
    case: Case | str,
    system: str,
    out: str | Path,
    *,
    steps: int | None = None,
    world_size: int | None = None,
    values: Sequence[str] = (),
    device: Device = "auto",
    share_gpus: bool = False,
    collectives: Collectives = "auto",
    timeout: float = 600.0,
    report_dir: str | Path = "reports",
) -> Path:
    """Record one system on a case at `out`, a folder that must not exist yet, and return it.

    `values` are patterns over step/kind/name of tensors whose values are kept beside their digests. Logs go to a run
    folder under `report_dir`. Raises UsageError for a call that is wrong and RankError when the system fails.
    """
    from bitproof.harness.capture.selection import parse_values
    from bitproof.harness.commands.record import record_to
    from bitproof.harness.commands.run import Changes, change_case
    from bitproof.harness.options import RunOptions
    from bitproof.harness.report.write import discard_if_bare, prepare_run_dir

    chosen = change_case(_find(case), Changes(steps=steps, world_size=world_size))
    options = RunOptions(
        device=device, share_gpus=share_gpus, collectives=collectives, timeout=timeout, values=parse_values(values)
    )
    folder = prepare_run_dir(Path(report_dir))
    try:
        record_to(Path(out), chosen, system, options, folder)
    finally:
        discard_if_bare(folder)
    return Path(out)


def diff(first: str | Path, second: str | Path) -> Comparison:
    """Compare two recordings: a verdict, counts by kind, and the first record that differs.

    Raises UsageError for a path that is no folder and RecordingError for a damaged recording.
    """
    from bitproof.harness.commands.record import compare_recordings

    return compare_recordings(Path(first), Path(second))


def _find(case: Case | str) -> Case:
    """A case, or the one of a name."""
    from bitproof.harness.commands.run import Changes, named_case

    return case if isinstance(case, Case) else named_case(cases(), case, Changes())
