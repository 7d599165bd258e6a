"""One recording alone, and two recordings compared: for systems that do not run at one time in one place.

A recording made on another machine, at another commit or with another torch is compared by what its
manifest and its digests say. What the manifests say differently is told next to the verdict: it is
where an explanation of a difference starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.capture.store import read_recording
from harness.case import Case
from harness.compare.verdict import Comparison, compare, leaf_differences
from harness.errors import CaseError, RecordingError, UsageError
from harness.launch import record_system
from harness.records import Recording, Verdict
from harness.report.progress import make_progress
from harness.report.text import locate
from harness.report.write import prepare_run_dir
from harness.run_options import RunOptions

STATUS = {Verdict.EQUAL: 0, Verdict.DIFFERENT: 1, Verdict.UNVERIFIED: 3}

# True of every two recordings, or follows from their digests.
_ALWAYS_DIFFERENT = ("digests_sha256", "values_sha256", "arm")


def record(case: Case, system: str, options: RunOptions, out: Path, report_dir: Path) -> int:
    """Record one system at `out`, a folder that must not exist yet. Logs go to a run folder. Returns 0, or raises."""
    if out.exists():
        raise UsageError(
            "the recording would overwrite something", expected="a folder that does not exist", found=str(out)
        )
    run_dir = prepare_run_dir(report_dir)
    print(f"bitproof: record {system} on {case.name}, logs in {run_dir}", flush=True)
    with make_progress(1) as progress:
        record_system(case, system, options, out, run_dir, progress.on_event)
    print(f"recording: {out}")
    return 0


def named_case(cases: Sequence[Case], name: str, steps: int | None) -> Case:
    """The case of exactly that name, with another number of steps if given. Raises UsageError when there is none."""
    for case in cases:
        if case.name == name:
            return case if steps is None else replace(case, steps=steps)
    raise UsageError("no such case", expected=", ".join(case.name for case in cases), found=name)


def diff(first: Path, second: Path, show: Callable[[str], None] = print) -> int:
    """Compare two recordings, show what they came to, and return the exit status.

    Raises UsageError for a path that is no folder and RecordingError for a damaged recording.
    """
    recordings = _read(first), _read(second)
    case = _case_of(recordings[0], first)
    comparison = compare(*recordings, case)
    for line in _tell(comparison, recordings, (first, second)):
        show(line)
    return STATUS[comparison.verdict]


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


def _tell(comparison: Comparison, recordings: tuple[Recording, Recording], folders: tuple[Path, Path]) -> Iterator[str]:
    yield f"{comparison.verdict}: {folders[0]} against {folders[1]}"
    if comparison.reason:
        yield comparison.reason.replace("the reference", "the first").replace("the candidate", "the second")
    for kind, compared in comparison.compared.items():
        yield f"  {kind}: {compared} compared, {comparison.mismatched[kind]} differ"
    if comparison.first_divergence:
        yield f"first divergence: {locate(comparison.first_divergence)}"
    yield from comparison.layout_mismatches
    differences = list(_manifest_differences(recordings[0].manifest, recordings[1].manifest))
    yield "the manifests agree" if not differences else "the manifests differ:"
    for path, (left, right) in differences:
        yield f"  {path}: {json.dumps(left)} against {json.dumps(right)}"


def _manifest_differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    names = [name for name in {**first, **second} if name not in _ALWAYS_DIFFERENT]
    yield from leaf_differences({name: (first.get(name), second.get(name)) for name in names})
