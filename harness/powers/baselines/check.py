"""`--baseline`: compares each system with its stored baseline, and finds the first call that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from bitproof.harness.case import Case
from bitproof.harness.checks.check import Check, Evidence
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.records import Drift, Finding, Role, Verdict
from bitproof.harness.settings import CHECKS, option, setting, settings


def _read_folder(baseline: bool, baseline_dir: str | Path | None) -> Path | None:
    if baseline_dir is not None and not baseline:
        raise UsageError("--baseline-dir needs --baseline", fix="add --baseline")
    return Path(baseline_dir or "baselines") if baseline else None


@dataclass(frozen=True)
class BaselineOptions:
    """The folder of baselines (None for no comparison), and whether a missing baseline is a failure."""

    baseline_dir: Path | None = settings(
        None,
        option(
            "--baseline",
            CHECKS,
            "Compare each system with its baseline, made by `record --baseline`.",
            kind=bool,
            default=False,
        ),
        option(
            "--baseline-dir",
            CHECKS,
            "Directory of baselines. [default: baselines]",
            kind=str | Path | None,
            metavar="DIR",
        ),
        read=_read_folder,
        to_options=lambda folder: {"baseline": folder is not None, "baseline_dir": folder},
    )
    require_baseline: bool = setting(
        False, "--require-baseline", CHECKS, "With --baseline, fail if a system has no baseline for this environment."
    )


class BaselineCheck(Check):
    """Compares each system with its baseline: an earlier recording of the same system on the same case."""

    name = "baseline"
    Options = BaselineOptions

    def __init__(self, options: BaselineOptions, *, logs_new: bool = False) -> None:
        """Create the check. With `logs_new`, it also logs the calls of recordings that have no baseline yet and will
        become baselines.
        """
        super().__init__(options)
        assert options.baseline_dir is not None, "`of` makes no check without a folder"
        self._folder = options.baseline_dir
        self._logs_new = logs_new

    @classmethod
    def of(cls, options: BaselineOptions) -> Self | None:
        """Return the check; None without `--baseline`. Raises UsageError for `--require-baseline` without
        `--baseline`.
        """
        if options.baseline_dir is not None:
            return cls(options)
        if options.require_baseline:
            raise UsageError("--require-baseline needs --baseline", fix="add --baseline")
        return None

    def values(self, case: Case, system: str) -> tuple[str, ...]:
        """Return patterns for the tensors whose values are in the system's baselines. A drift is measured with these
        values.
        """
        from bitproof.harness.powers.baselines.baseline_folders import values_to_keep

        return values_to_keep(self._folder, case, system)

    def prepare(self, cases: Sequence[Case], options: RunOptions, folder: Path) -> Iterator[str]:
        """Yield a line for each baseline whose case or system no longer exists."""
        from bitproof.builtin_cases import all_cases
        from bitproof.harness.powers.baselines.baseline_folders import unused_baselines

        for unused in unused_baselines(self._folder, [*all_cases(), *cases]):
            yield f"unused baseline: {unused}, of no system of any case that is known"

    def judges(self, verdict: Verdict) -> bool:
        """Return True: even a failed case is compared, because its systems may have made recordings before the
        failure.
        """
        return True

    def judge(self, evidence: Evidence) -> Finding:
        """Compare each system's recording with its baseline. If a system drifted, find the first call that changed.

        With `logs_new`, the first step's calls are also logged for recordings without a baseline, which may become
        baselines. If the calls of a drifted system cannot be logged, its result states the reason.
        """
        from bitproof.harness.powers.baselines.baseline_folders import compare_with_baselines, require_baseline
        from bitproof.harness.powers.baselines.report import finding_of

        case, found = evidence.case, dict[Role, BaselineResult]()

        def measure_drift(baseline: Path, recording: Path) -> list[Drift]:
            # In another process, since comparing values needs torch.
            drift = evidence.call(f"{__name__}:drift_of", baseline=baseline.resolve(), recording=recording)["drift"]
            return [Drift(**each) for each in drift]

        systems: dict[Role, str] = {"reference": case.reference, "candidate": case.candidate}
        for role, system in systems.items():
            about = compare_with_baselines(evidence.path(role), self._folder, case, system, measure_drift)
            found[role] = require_baseline(about) if self.options.require_baseline else about
        # If the case failed, its systems cannot be replayed to log calls.
        for role, about in found.items() if evidence.result.verdict != Verdict.ERROR else ():
            if about.status == BaselineStatus.DRIFTED:
                found[role] = _with_call(about, evidence, role)
            elif self._logs_new and about.status not in (BaselineStatus.EQUAL, BaselineStatus.UNVERIFIED):
                log_calls(evidence.log_calls, role, evidence.path(role))
        return finding_of(found, systems)

    @staticmethod
    def finding(data: dict[str, Any]) -> Finding:
        """Rebuild the finding from `cases[i].baseline` of an earlier report."""
        from bitproof.harness.powers.baselines.report import finding_of, read_data

        return finding_of(read_data(data), {})

    @staticmethod
    def contradiction(data: dict[str, Any]) -> tuple[str, str, str] | None:
        """Find a contradiction: EQUAL although records differ or none was compared, or DRIFTED without a difference.

        Returns three texts: the value's path, the violated rule, and the status. Returns None if there is no
        contradiction.
        """
        from bitproof.harness.powers.baselines.report import read_data

        for role, found in read_data(data).items():
            status = found.status
            if status == BaselineStatus.EQUAL and (not found.compared or found.mismatched or found.drift):
                return f"{role}.status", "no EQUAL, as records differ or none was compared", status.value
            if status == BaselineStatus.DRIFTED and not found.mismatched:
                return f"{role}.status", "no DRIFTED, as no record differs", status.value
        return None


def drift_of(_: Case, baseline: str, recording: str) -> dict[str, list[Drift]]:
    """Return {"drift": a list of the tensors that differ, each with the size of the difference}. Needs torch."""
    from bitproof.harness.compare.drift import measure_drift

    return {"drift": measure_drift(Path(baseline), Path(recording))}


def log_calls(logged: Callable[[Role, int], list[Path]], role: Role, recording: Path) -> str | None:
    """Log the calls of a recording's first step, and store the log with the recording. Return None, or the reason for a
    failure.

    `logged` replays a role's system, logs the calls of a step, and returns an archive for each rank.
    """
    from bitproof.harness.capture.recording_files import add_calls
    from bitproof.harness.localize.logs.replay import packed_calls
    from bitproof.harness.powers.baselines.moved_call import LOGGED_STEP

    try:
        add_calls(recording, LOGGED_STEP, [packed_calls(archive) for archive in logged(role, LOGGED_STEP)])
    # The comparison of bits holds without a log, so the failure is only a reason in the report.
    except BitproofError as error:
        return error.what
    return None


def _with_call(about: BaselineResult, evidence: Evidence, role: Role) -> BaselineResult:
    from bitproof.harness.powers.baselines.moved_call import moved_call

    recording = evidence.path(role)
    # The log is stored with the recording, which may become the next baseline.
    why = log_calls(evidence.log_calls, role, recording)
    if why is None:
        try:
            assert about.path is not None
            call = moved_call(Path(about.path), recording)
            if call is not None:
                return replace(about, call=call)
            why = "no logged call explains what drifted"
        except BitproofError as error:
            why = error.what
    return replace(about, reasons=[*about.reasons, f"the operator that moved is not known: {why}"])
