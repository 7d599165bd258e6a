"""Does a report say what the recordings in its run's folder show? Asked of every report that a command reads there.

A report alone can be forged so that its own numbers agree. Recordings lie beside it, in `recordings/<case>/<system>`:
where those of both sides are there, what was compared is counted again, and what differs. Where they are gone, a report
is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import CaseResult, Report, Verdict
from bitproof.harness.report import json as report_json

_JUDGED = (Verdict.EQUAL, Verdict.CLOSE, Verdict.DIFFERENT)


def read_run(run_dir: Path) -> Report:
    """A run folder's report. Raises RecordingError where it is damaged, or recordings beside it say otherwise."""
    path = run_dir / report_json.FILE_NAME
    report = report_json.read(path)
    for index, result in enumerate(report.cases):
        if result.verdict in _JUDGED and not result.case.is_foreign and result.case.reference != result.case.candidate:
            _refuse_other(result, run_dir / "recordings" / result.case.name, f"report.cases[{index}]", path)
    return report


def _refuse_other(result: CaseResult, folder: Path, field: str, path: Path) -> None:
    from bitproof.harness.capture.store import read_recording

    found = dict(first_runs(folder))
    systems = (result.case.reference, result.case.candidate)
    if not all(system in found for system in systems):
        return
    reference, candidate = (read_recording(found[system]) for system in systems)
    seen = compare(reference, candidate, result.case)
    for name, expected, told in (
        ("compared", seen.compared, result.compared),
        ("mismatched", seen.mismatched, result.mismatched),
        ("losses.reference", reference.losses(), result.losses["reference"]),
        ("losses.candidate", candidate.losses(), result.losses["candidate"]),
    ):
        if expected != told:
            raise RecordingError(
                f"{field}.{name} is damaged",
                expected=f"{expected}, by the recordings in {folder}"[:2000],
                found=repr(told)[:200],
                where=str(path),
            )


def first_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The recordings of first runs by their system: second runs have another arm."""
    from bitproof.harness.capture.store import MANIFEST, read_manifest

    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        about = read_manifest(manifest.parent)
        if about.arm in (None, "first"):
            yield about.system, manifest.parent
