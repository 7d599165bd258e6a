"""One recording alone, and two recordings compared: for systems that do not run at one time in one place.

A recording made on another machine, at another commit or with another torch is compared by what its
manifest and its digests say. What the manifests say differently is told next to the verdict: it is
where an explanation of a difference starts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.baselines import file_baseline
from harness.capture.selection import chooser, first_and_last_step, name_value
from harness.capture.store import put_in_place, read_recording
from harness.case import Case
from harness.compare.verdict import Comparison, compare, leaf_differences
from harness.errors import CaseError, RecordingError, UsageError
from harness.launch import record_system
from harness.records import Recording, Verdict
from harness.report import text
from harness.report.progress import make_progress
from harness.report.write import prepare_run_dir
from harness.run_options import RunOptions

STATUS = {Verdict.EQUAL: 0, Verdict.DIFFERENT: 1, Verdict.UNVERIFIED: 3}

# True of every two recordings, or follows from their digests.
_ALWAYS_DIFFERENT = ("digests_sha256", "values_sha256", "manifest_sha256", "arm", "values")
MAX_TENSORS = 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a recording goes: to the folder `out`, or among the baselines in `baseline_dir`.

    With `force` a baseline of the same environment is replaced; `out` must not exist yet.
    """

    out: Path | None = None
    baseline_dir: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if (self.out is None) == (self.baseline_dir is None) or (self.force and self.baseline_dir is None):
            raise UsageError(
                "a recording needs one place to go to",
                expected="--out DIR, or --baseline, which --force may go with",
                found="both"
                if self.out and self.baseline_dir
                else "--force without --baseline"
                if self.out
                else "none",
            )
        if self.out is not None and self.out.exists():
            raise UsageError(
                "the recording would overwrite something", expected="a folder that does not exist", found=str(self.out)
            )


def record(case: Case, system: str, options: RunOptions, target: Target, report_dir: Path) -> int:
    """Record one system. Logs go to a run folder. Returns 0, or raises, and then leaves nothing at the target.

    A baseline keeps the values of its first and last step unless `options` say otherwise. Raises UsageError when
    none of a pattern's tensors were there, or a baseline is, and RankError when the system fails.
    """
    if target.baseline_dir is not None and not options.values:
        options = replace(options, values=first_and_last_step(case.steps))
    run_dir = prepare_run_dir(report_dir)
    print(f"bitproof: record {system} on {case.name}, logs in {run_dir}", flush=True)
    with _beside(target.out or target.baseline_dir / case.name) as new:  # type: ignore[operator]
        with make_progress(1) as progress:
            record_system(case, system, options, new, run_dir, progress.on_event)
        _refuse_idle_patterns(new, options.values)
        if target.out is not None:
            put_in_place(new, target.out)
            print(f"recording: {target.out}")
        else:
            assert target.baseline_dir is not None
            folder = file_baseline(new, target.baseline_dir, case, system, force=target.force)
            print(f"baseline: {folder}")
    return 0


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A hidden folder's path beside `folder`, removed in the end unless it was moved away."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _refuse_idle_patterns(folder: Path, patterns: Sequence[str]) -> None:
    """A pattern that chose nothing is a mistake that would show only when a value is missed."""
    keys = read_recording(folder).records
    for pattern in patterns:
        if not any(map(chooser([pattern]), keys)):
            raise UsageError(
                "--values chose no tensor",
                expected="a pattern that fits step/kind/name of some tensor, such as " + name_value(next(iter(keys))),
                found=pattern,
            )


def diff(first: Path, second: Path, show: Callable[[str], None] = print) -> int:
    """Compare two recordings, show what they came to, and return the exit status.

    Raises UsageError for a path that is no folder and RecordingError for a damaged recording.
    """
    recordings = _read(first), _read(second)
    case = _case_of(recordings[0], first)
    comparison = _refuse_other_data(recordings) or compare(*recordings, case)
    drift = []
    if comparison.verdict == Verdict.DIFFERENT:
        from harness.compare.drift import measure_drift  # loads torch

        drift = measure_drift(first, second)
    for line in _tell(comparison, recordings, (first, second), drift):
        show(line)
    return STATUS[comparison.verdict]


def _refuse_other_data(recordings: tuple[Recording, Recording]) -> Comparison | None:
    """Systems that read other data must differ: that says nothing about either."""
    read = [_data_of(recording.manifest) for recording in recordings]
    ranks = [rank for rank, (left, right) in enumerate(zip(*read, strict=False)) if left and right and left != right]
    if not ranks:
        return None
    left, right = (data[ranks[0]] for data in read)
    return Comparison(
        verdict=Verdict.UNVERIFIED,
        reason="the recordings are not comparable\n"
        f"  they read other data, first on rank {ranks[0]}: sha256 {left} in the first, {right} in the second",
    )


def _data_of(manifest: dict[str, Any]) -> list[Any]:
    ranks = manifest.get("ranks")
    known = [rank if isinstance(rank, dict) else {} for rank in ranks] if isinstance(ranks, list) else []
    return [rank.get("data_sha256") for rank in known]


def _read(folder: Path) -> Recording:
    if not folder.is_dir():
        raise UsageError("there is no such recording", expected="a folder with manifest.json", found=str(folder))
    return read_recording(folder)


def _case_of(recording: Recording, folder: Path) -> Case:
    values = recording.manifest.get("case")
    try:
        return Case.from_dict(values)  # type: ignore[arg-type]
    except CaseError as error:
        raise RecordingError(
            "the manifest does not say which case it recorded", found=error.what, where=str(folder)
        ) from error


def _tell(
    comparison: Comparison,
    recordings: tuple[Recording, Recording],
    folders: tuple[Path, Path],
    drift: list[dict[str, Any]],
) -> Iterator[str]:
    yield f"{comparison.verdict}: {folders[0]} against {folders[1]}"
    if comparison.reason:
        yield comparison.reason.replace("the reference", "the first").replace("the candidate", "the second")
    for kind, compared in comparison.compared.items():
        yield f"  {kind}: {compared} compared, {comparison.mismatched[kind]} differ"
    if comparison.first_divergence:
        yield f"first divergence: {text.locate(comparison.first_divergence)}"
    yield from (f"  {line}" for line in text.drift(drift, ("in the first", "in the second"), len(drift), MAX_TENSORS))
    yield from comparison.layout_mismatches
    differences = list(_manifest_differences(recordings[0].manifest, recordings[1].manifest))
    yield "the manifests agree" if not differences else "the manifests differ:"
    for path, (left, right) in differences:
        yield f"  {json.dumps(path)[1:-1]}: {json.dumps(left)} against {json.dumps(right)}"


def _manifest_differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    names = [name for name in {**first, **second} if name not in _ALWAYS_DIFFERENT]
    yield from leaf_differences({name: (first.get(name), second.get(name)) for name in names})
