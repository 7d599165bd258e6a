"""`bitproof record` and `bitproof diff`: record one system, and compare recordings from different times or places.

Differences between the recordings' manifests, such as another torch, are printed next to the verdict.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitproof.harness.capture.recording_files import put_in_place, read_recording
from bitproof.harness.capture.selection import chooser, first_and_last_step, name_value
from bitproof.harness.case import Case
from bitproof.harness.checks.explanation import explainer_of
from bitproof.harness.checks.power_modules import power_module
from bitproof.harness.commands.following import follow_rank_0
from bitproof.harness.compare.same_case import leaf_differences
from bitproof.harness.compare.verdict import compare, demand_substance
from bitproof.harness.errors import CaseError, RecordingError, UsageError
from bitproof.harness.execute.launch import record_system
from bitproof.harness.execute.transport import follows
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Comparison, Drift, Manifest, Recording, Verdict
from bitproof.harness.report.diff import describe_diff
from bitproof.harness.report.progress import make_progress
from bitproof.harness.report.write import discard_if_bare, prepare_run_dir
from bitproof.harness.runtime import interrupts

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun

STATUS = {Verdict.EQUAL: 0, Verdict.DIFFERENT: 1, Verdict.UNVERIFIED: 3}

# Fields of a manifest that differ between any two recordings, or that follow from the digests.
_ALWAYS_DIFFERENT = ("digests_sha256", "values_sha256", "manifest_sha256", "arm", "values", "calls", "accepted")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The destination of a recording: a new folder `out`, or the baselines in `baseline_dir`.

    With `force`, an existing baseline of the same environment is replaced. Raises UsageError unless exactly one of the
    two is given, or if `out` exists.
    """

    out: Path | None = None
    baseline_dir: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if (self.out is None) == (self.baseline_dir is None) or (self.force and self.baseline_dir is None):
            raise UsageError(
                "record needs exactly one of --out DIR and --baseline",
                expected="--out DIR, or --baseline with or without --force",
                found="both"
                if self.out and self.baseline_dir
                else "--force without --baseline"
                if self.out
                else "none",
            )
        if self.out is not None and self.out.exists():
            raise _would_overwrite(self.out)


def record(case: Case, system: str, options: RunOptions, target: Target, report_dir: Path) -> int:
    """Record a system on a case, with logs in a run folder. Returns 0. After an error, the target is unchanged.

    Raises UsageError if a pattern for values matches no tensor, or if a baseline exists. Raises RankError if the system
    fails.
    """
    if target.baseline_dir is not None:
        values = options.values or first_and_last_step(case.steps)
        options = replace(options, values=values)
    if follows():
        return follow_rank_0(case, options, report_dir)
    # Interrupts are let in only while the system runs: the folder is made and removed undisturbed.
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        try:
            with interrupts.let_in():
                _record(case, system, options, target, run_dir)
        except interrupts.STOPS:
            discard_if_bare(run_dir)
            raise
    return 0


def _record(case: Case, system: str, options: RunOptions, target: Target, run_dir: Path) -> None:
    print(f"bitproof: record {system} on {case.name}, logs in {run_dir}", flush=True)
    # Made next to its destination, so that the last step is a rename.
    with _hidden_folder_beside(target.out or target.baseline_dir / case.name) as new:  # type: ignore[operator]

        def then(run: CaseRun) -> None:
            if target.baseline_dir is not None:
                power_module("baselines.check").log_calls(run.log_calls, "reference", new)

        with make_progress(1) as progress:
            _record_into(case, system, options, new, run_dir, progress.on_event, then)
        # The recording is complete, so an interrupt must not keep it from its destination.
        interrupts.too_late()
        if target.out is not None:
            _put_in_place(new, target.out)
            print(f"recording: {target.out}")
        else:
            assert target.baseline_dir is not None
            folders = power_module("baselines.baseline_folders")
            folder = folders.store_baseline(new, target.baseline_dir, case, system, force=target.force)
            print(f"baseline: {folder}")


def record_to(out: Path, case: Case, system: str, options: RunOptions, run_dir: Path) -> None:
    """Record a system into the new folder `out`, completely or not at all. Prints nothing.

    Raises UsageError if `out` exists, or if a pattern for values matches no tensor, and RankError if the system fails.
    """
    Target(out=out)  # raises UsageError if `out` exists
    with _hidden_folder_beside(out) as new:
        _record_into(case, system, options, new, run_dir)
        _put_in_place(new, out)


def _put_in_place(new: Path, out: Path) -> None:
    try:
        put_in_place(new, out, replaces=False)
    except FileExistsError as error:
        raise _would_overwrite(out) from error


def _would_overwrite(out: Path) -> UsageError:
    return UsageError(
        "the recording would overwrite something", expected="a folder that does not exist", found=str(out)
    )


def _record_into(case: Case, system: str, options: RunOptions, new: Path, run_dir: Path, *listeners: Any) -> None:
    record_system(case, system, options, new, run_dir, *listeners)
    _refuse_patterns_without_match(new, options.values)


@contextmanager
def _hidden_folder_beside(folder: Path) -> Iterator[Path]:
    """Context with the path of a hidden folder next to `folder`, for preparing the content of `folder`.

    The hidden folder is removed at the end of the block, unless it was renamed.
    """
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.new")
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _refuse_patterns_without_match(folder: Path, patterns: Sequence[str]) -> None:
    # Otherwise a misspelled pattern would be noticed only when the values are needed.
    keys = read_recording(folder).records
    for pattern in patterns:
        if not any(map(chooser([pattern]), keys)):
            raise UsageError(
                "--values chose no tensor",
                expected="a pattern that fits step/kind/name of some tensor, such as " + name_value(next(iter(keys))),
                found=pattern,
            )


def diff(first: Path, second: Path, show: Callable[[str], None] = print, *, certificate: Path | None = None) -> int:
    """Compare two recordings, print the result with `show`, and return the exit status.

    With a certificate, also print whether it explains the difference. Raises UsageError if a path is no folder, and
    RecordingError for damaged files.
    """
    # First, since a damaged certificate must not cost the time of reading two recordings.
    explain = None if certificate is None else explainer_of(certificate)
    recordings = _read(first), _read(second)
    comparison = _compare(recordings, first)
    drift: list[Drift] = []
    if comparison.verdict == Verdict.DIFFERENT:
        from bitproof.harness.compare.drift import measure_drift  # loads torch

        drift = measure_drift(first, second)
    differences = _manifest_differences(recordings[0].manifest, recordings[1].manifest)
    systems = recordings[0].manifest.system, recordings[1].manifest.system
    name = str(recordings[0].manifest.case.get("name"))
    has_drift = explain is not None and comparison.verdict == Verdict.DIFFERENT
    for line in describe_diff(comparison, (first, second), drift, differences, systems, name, advises=explain is None):
        show(line)
    if explain is not None:
        show(explain(*recordings).text if has_drift else f"nothing to explain: {comparison.verdict}")
    return STATUS[comparison.verdict]


def compare_recordings(first: Path, second: Path) -> Comparison:
    """Compare two recordings without printing.

    Raises UsageError if a path is not a folder, and RecordingError for a damaged recording.
    """
    return _compare((_read(first), _read(second)), first)


def _compare(recordings: tuple[Recording, Recording], folder: Path) -> Comparison:
    case = _case_of(recordings[0], folder)
    # Input data first: other data explain every difference, and equal digests would be chance.
    return _refuse_other_data(recordings) or demand_substance(compare(*recordings, case))


def _refuse_other_data(recordings: tuple[Recording, Recording]) -> Comparison | None:
    """Return an UNVERIFIED comparison if the recordings were made with different input data, otherwise None.

    Such recordings would differ even if the systems were equal.
    """
    # Two lists, one for each recording, with the digest of the data of each rank; None in recordings without it.
    read = [[rank.get("data_sha256") for rank in recording.manifest.ranks or ()] for recording in recordings]
    ranks = [rank for rank, (left, right) in enumerate(zip(*read, strict=False)) if left and right and left != right]
    if not ranks:
        return None
    # The digests of the first rank with other data, for the message.
    left, right = (data[ranks[0]] for data in read)
    return Comparison(
        verdict=Verdict.UNVERIFIED,
        reason="the recordings are not comparable\n"
        f"  they read other data, first on rank {ranks[0]}: sha256 {left} in the first, {right} in the second",
    )


def _read(folder: Path) -> Recording:
    if not folder.is_dir():
        raise UsageError("there is no such recording", expected="a folder with manifest.json", found=str(folder))
    return read_recording(folder)


def _case_of(recording: Recording, folder: Path) -> Case:
    try:
        return Case.from_dict(recording.manifest.case)
    except CaseError as error:
        raise RecordingError(
            "the manifest does not say which case it recorded", found=error.what, where=str(folder)
        ) from error


def _manifest_differences(first: Manifest, second: Manifest) -> Iterator[tuple[str, tuple[Any, Any]]]:
    left, right = first.to_dict(), second.to_dict()
    names = sorted(left.keys() - set(_ALWAYS_DIFFERENT))
    yield from leaf_differences({name: (left[name], right[name]) for name in names})
