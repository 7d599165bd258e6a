"""Write report.json, a run's complete result, and read it back, checking every field.

A file from disk is not trusted. RecordingError is raised if it is too large or damaged, or if its numbers contradict
each other.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from bitproof.harness.checks.shipped import SHIPPED, shipped
from bitproof.harness.consistency import contradiction, contradiction_in
from bitproof.harness.errors import RecordingError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.records import CaseResult, Divergence, Report, Shard
from bitproof.harness.report.schema import CaseEntry, FlatDivergence, ReportEntry, plain
from bitproof.harness.report.status import WRONG_CALL, exit_status
from bitproof.harness.validate import parse as parse_json
from bitproof.harness.validate import read as read_checked

FILE_NAME = "report.json"
MAX_BYTES = 64 * 2**20


def render(report: Report) -> str:
    """Return the report as JSON text. JSON has no infinity and no NaN, so such measurements become null."""
    values = to_dict(report)
    # Nearly every report has finite numbers only, so the copy with nulls is made only if this fails.
    try:
        text = json.dumps(values, indent=1, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(values), indent=1, allow_nan=False)
    return text + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_dict(report: Report) -> dict[str, Any]:
    return cast(dict[str, Any], plain(ReportEntry.of(report)))


def read(path: Path) -> Report:
    """Read a report from a file. Raises RecordingError if the report is missing, damaged or contradicts itself."""
    try:
        return parse(read_plain(path, MAX_BYTES).decode(), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        latest = path.parent / "latest"
        raise RecordingError(
            "a report cannot be read",
            found=str(error),
            where=str(path),
            fix=f"give a run's folder, such as {latest}" if latest.is_dir() else None,
        ) from error


def parse(text: str, where: str = FILE_NAME) -> Report:
    """Read a report from a JSON text. Unknown fields are ignored: a later version may have added them."""
    try:
        entry = read_checked(
            ReportEntry, upgraded(parse_json(text)), "report", RecordingError, damaged="is damaged", where=where
        )
    except (ValueError, RecursionError) as error:
        raise RecordingError("a report is not JSON", found=str(error), where=where) from error
    report = Report(
        run_id=entry.run_id,
        exit_status=entry.exit_status,
        environment=entry.environment,
        cases=[_result(case, f"report.cases[{index}]", where) for index, case in enumerate(entry.cases)],
        options=tuple(entry.options),
        not_run=entry.not_run,
        remarks=tuple(entry.remarks),
        faults=entry.faults,
        shard=_shard(entry, where),
        left_out=tuple(entry.left_out),
    )
    if found := contradiction_in(report):
        raise _damaged(f"report.{found.field}", found.expected, found.found, where)
    status = exit_status(report.cases, is_shard=report.shard is not None, faults=report.faults)
    # WRONG_CALL cannot be derived from the cases: the call itself was refused.
    if report.exit_status not in (status, WRONG_CALL):
        raise _damaged("report.exit_status", f"{status}, by its cases", report.exit_status, where)
    return report


def upgraded(values: Any) -> Any:
    """Convert the JSON values of a report of an older version.

    In older reports each check has a field of its own in a case. These fields move into the case's field `checks`.
    """
    if not isinstance(values, dict):
        return values
    for case in values["cases"] if isinstance(values.get("cases"), list) else ():
        # The values are not checked yet, so any of them may have another type.
        for name in SHIPPED if isinstance(case, dict) else ():
            if data := case.pop(name, None):
                case.setdefault("checks", {})[name] = asdict(shipped(name).finding(data))
    return values


def _result(entry: CaseEntry, field: str, where: str) -> CaseResult:
    """Return the result of a case from its entry in a report. `field` is the entry's path, such as `report.cases[0]`.

    Raises RecordingError if the entry's verdict does not follow from its numbers.
    """
    result = entry.result()
    case = result.case
    # These fields repeat the case's for readers, and must not contradict it.
    for name in ("name", "expected", "reference", "candidate"):
        if getattr(entry, name) != getattr(case, name):
            raise _damaged(f"{field}.{name}", f"{getattr(case, name)!r}, by its case", getattr(entry, name), where)
    # A report is an input of merge and CI: a verdict must follow from its own numbers.
    if found := contradiction(result):
        raise _damaged(f"{field}.{found.field}", found.expected, found.found, where)
    # Only bitproof's own checks have rules for their data; a user's check may write anything.
    for name, finding in result.checks.items():
        if refused := shipped(name).contradiction(finding.data) if name in SHIPPED else None:
            path, expected, wrong = refused
            raise _damaged(f"{field}.checks.{name}.data.{path}", expected, wrong, where)
    if entry.as_expected not in (None, result.as_expected):
        expected = f"{json.dumps(result.as_expected)}, by its verdict"
        raise _damaged(f"{field}.as_expected", expected, entry.as_expected, where)
    return result


def _shard(entry: ReportEntry, where: str) -> Shard | None:
    if entry.shard is None:
        return None
    if entry.selection is None:
        raise _damaged("report.selection", "an array", None, where)
    shard = Shard.parse(entry.shard, entry.selection)
    if shard is None:
        raise _damaged("report.shard", "a text such as 2/4", entry.shard, where)
    return shard


def _damaged(field: str, expected: str, found: object, where: str) -> RecordingError:
    return RecordingError(f"{field} is damaged", expected=expected, found=repr(found)[:200], where=where)


def divergence_to_dict(divergence: Divergence | None) -> dict[str, Any] | None:
    """Return a divergence as the JSON object of report.json, with the fields of its tensor and of the blamed call."""
    return None if divergence is None else cast(dict[str, Any], plain(FlatDivergence.of(divergence)))
