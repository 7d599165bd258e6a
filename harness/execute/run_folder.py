"""Check a run folder's report against the recordings beside it.

A forged report may be consistent, so its numbers are computed again from the recordings. If the recordings were
deleted, only the numbers of tensors are checked: the case's model determines them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import CaseError, RecordingError
from bitproof.harness.records import CaseResult, Report, Verdict
from bitproof.harness.report import json as report_json
from bitproof.harness.systems.registry import BUILT_IN

_JUDGED = (Verdict.EQUAL, Verdict.CLOSE, Verdict.DIFFERENT)


def read_run(run_dir: Path) -> Report:
    """Return a run folder's report. Raises RecordingError if it is damaged, or if the recordings beside it contradict
    it.
    """
    path = run_dir / report_json.FILE_NAME
    report = report_json.read(path)
    for index, result in enumerate(report.cases):
        if result.verdict in _JUDGED and not result.case.is_foreign and result.case.reference != result.case.candidate:
            # The first wrong value is enough for the error.
            for name, expected, source, value in _wrong_values(result, run_dir / "recordings" / result.case.name):
                raise RecordingError(
                    f"report.cases[{index}].{name} is damaged",
                    expected=f"{expected}, by {source}"[:2000],
                    found=repr(value)[:200],
                    where=str(path),
                )
    return report


def _wrong_values(result: CaseResult, folder: Path) -> Iterator[tuple[str, object, str, object]]:
    """Yield each wrong value in a result as four parts: the field, its correct value, the source of that value, and the
    value found.

    Example: `("mismatched", 3, "the recordings in reports/latest/recordings/moe", 0)`.
    """
    from bitproof.harness.capture.recording_files import read_recording

    found = dict(first_runs(folder))
    systems = (result.case.reference, result.case.candidate)
    # Recordings may have been deleted to save space. Then only counts can be checked.
    if not all(system in found for system in systems):
        yield from _wrong_counts(result)
        return
    reference, candidate = (read_recording(found[system]) for system in systems)
    seen = compare(reference, candidate, result.case)
    for name, expected, value in (
        ("compared", seen.compared, result.compared),
        ("mismatched", seen.mismatched, result.mismatched),
        ("losses.reference", reference.losses(), result.losses["reference"]),
        ("losses.candidate", candidate.losses(), result.losses["candidate"]),
    ):
        if expected != value:
            yield name, expected, f"the recordings in {folder}", value


def _wrong_counts(result: CaseResult) -> Iterator[tuple[str, object, str, object]]:
    # How many tensors a user's systems record is not known.
    if not {result.case.reference, result.case.candidate} <= {*BUILT_IN}:
        return
    from bitproof.reference.step import num_records_per_step

    try:
        counts = num_records_per_step(result.case)
    except CaseError as error:  # a model under a new name must not evade its counts
        by = "systems of ours and no recordings beside the report"
        yield "case.model", "a model that this version of bitproof can build", by, error.what
        return
    # `counts` has the records of a single step.
    for kind, count in counts.items():
        expected, value = count * result.steps, result.compared.get(kind, 0)
        if expected != value:
            yield f"compared.{kind}", expected, "the case's model", value


def first_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield, for each recording of a first run, the system and the folder: `arm` in its manifest is "first" or
    missing.
    """
    from bitproof.harness.capture.recording_files import MANIFEST, read_manifest

    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        about = read_manifest(manifest.parent)
        if about.arm in (None, "first"):
            yield about.system, manifest.parent
