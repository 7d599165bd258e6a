"""report.json: the truth of a run, written from a Report and read back with nothing taken on trust.

A file from disk is data: it is parsed as JSON, bounded in size, and checked field by field. One that
is damaged, or that claims more than its own numbers show, raises RecordingError.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

from harness.case import KINDS, Case
from harness.errors import CaseError, RecordingError
from harness.records import SCHEMA, CaseResult, Divergence, Report, Verdict
from harness.report.status import exit_status

FILE_NAME = "report.json"
MAX_BYTES = 64 * 2**20
SIDES = ("reference", "candidate")


def render(report: Report) -> str:
    """The report as JSON text."""
    return json.dumps(to_dict(report), indent=1, allow_nan=False) + "\n"


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain JSON values."""
    return {
        "schema": SCHEMA,
        "run_id": report.run_id,
        "exit_status": report.exit_status,
        "environment": report.environment,
        "options": list(report.options),
        "cases": [_case_to_dict(result) for result in report.cases],
    }


def read(path: Path) -> Report:
    """The report in a file. Raises RecordingError when it is missing, damaged or contradicts itself."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordingError(
                "a report is too large to read", expected=f"at most {MAX_BYTES} bytes", where=str(path)
            )
        return parse(path.read_bytes().decode(), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError("a report cannot be read", found=str(error), where=str(path)) from error


def parse(text: str, where: str = FILE_NAME) -> Report:
    """The report in a JSON text. Unknown fields are passed over: schema 1 grows by adding fields."""
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RecordingError("a report is not JSON", found=str(error), where=where) from error
    reader = _Reader(where)
    top = reader.table(values, "report")
    if top.get("schema") != SCHEMA:
        raise reader.refuse("report.schema", str(SCHEMA), top.get("schema"))
    report = Report(
        run_id=reader.text(top, "run_id", "report"),
        exit_status=reader.number(top, "exit_status", "report"),
        environment=reader.table(top.get("environment"), "report.environment"),
        cases=[
            _case_from_dict(reader, entry, f"report.cases[{index}]")
            for index, entry in enumerate(reader.array(top.get("cases"), "report.cases"))
        ],
        options=tuple(reader.texts(top.get("options", []), "report.options")),
    )
    if report.exit_status != exit_status(report.cases) and report.exit_status != 2:
        raise reader.refuse("report.exit_status", f"{exit_status(report.cases)}, by its cases", report.exit_status)
    return report


def _case_to_dict(result: CaseResult) -> dict[str, Any]:
    divergence = result.first_divergence
    return {
        "name": result.case.name,
        "verdict": result.verdict.value,
        "expected": result.case.expected,
        "as_expected": result.as_expected,
        "reference": result.case.reference,
        "candidate": result.case.candidate,
        "world_size": result.world_size,
        "steps": result.steps,
        "device": result.device,
        "backend": result.backend,
        "compared": result.compared,
        "mismatched": result.mismatched,
        "differing_kinds": list(result.differing_kinds),
        "control": result.control,
        "losses": result.losses,
        "first_divergence": divergence.to_dict() if divergence else None,
        "error": result.error,
        "seconds": result.seconds,
        "passes": result.passes,
        "case": result.case.to_dict(),
    }


def _case_from_dict(reader: _Reader, entry: Any, where: str) -> CaseResult:
    values = reader.table(entry, where)
    try:
        case = Case.from_dict(reader.table(values.get("case"), f"{where}.case"))
    except (CaseError, TypeError, ValueError) as error:
        raise RecordingError(f"{where}.case is not a case", found=str(error), where=reader.where) from error
    divergence = values.get("first_divergence")
    result = CaseResult(
        case=case,
        verdict=Verdict(reader.choice(values, "verdict", where, [verdict.value for verdict in Verdict])),
        steps=reader.number(values, "steps", where),
        world_size=reader.number(values, "world_size", where),
        device=reader.text(values, "device", where),
        backend=reader.text(values, "backend", where),
        compared=reader.counts(values.get("compared"), f"{where}.compared"),
        mismatched=reader.counts(values.get("mismatched"), f"{where}.mismatched"),
        differing_kinds=tuple(reader.kinds(values.get("differing_kinds", []), f"{where}.differing_kinds")),
        control=reader.control(values.get("control"), f"{where}.control"),
        losses=reader.losses(values.get("losses"), f"{where}.losses"),
        first_divergence=None if divergence is None else _divergence(reader, divergence, f"{where}.first_divergence"),
        error=reader.optional_text(values, "error", where),
        seconds=reader.table(values.get("seconds"), f"{where}.seconds"),
        passes=[
            _pass(reader, item, f"{where}.passes[{index}]")
            for index, item in enumerate(reader.array(values.get("passes", []), f"{where}.passes"))
        ],
    )
    _refuse_contradictions(reader, values, result, where)
    return result


def _refuse_contradictions(reader: _Reader, values: dict[str, Any], result: CaseResult, where: str) -> None:
    """A verdict that its own evidence does not carry is worse than none."""
    case = result.case
    for name in ("name", "expected", "reference", "candidate"):
        if values.get(name) != getattr(case, name):
            raise reader.refuse(f"{where}.{name}", f"{getattr(case, name)!r}, by its case", values.get(name))
    is_equal = result.verdict == Verdict.EQUAL
    if is_equal and not all(result.compared[kind] for kind in ("loss", "grad", "param", "optimizer")):
        raise reader.refuse(f"{where}.verdict", "no EQUAL, as a kind was not compared", result.verdict.value)
    has_difference = any(result.mismatched.values()) or result.differing_kinds or result.first_divergence is not None
    if is_equal and has_difference:
        raise reader.refuse(f"{where}.verdict", "no EQUAL, as records differ", result.verdict.value)
    if result.verdict == Verdict.DIFFERENT and not any(result.mismatched.values()):
        raise reader.refuse(f"{where}.verdict", "no DIFFERENT, as no record differs", result.verdict.value)


def _pass(reader: _Reader, entry: Any, where: str) -> dict[str, Any]:
    values = reader.table(entry, where)
    reader.text(values, "name", where)
    for name in ("settings", "facts"):
        reader.table(values.get(name, {}), f"{where}.{name}")
    for operator, counts in reader.table(values.get("changed", {}), f"{where}.changed").items():
        if not isinstance(counts, list) or [type(count) for count in counts] != [int, int]:
            raise reader.refuse(f"{where}.changed.{operator}", "two integers", counts)
    for name, kinds in (("seconds", (int, float)), ("nodes_before", (int,)), ("nodes_after", (int,))):
        if type(values.get(name)) not in kinds:
            raise reader.refuse(f"{where}.{name}", "a number", values.get(name))
    return values


def _divergence(reader: _Reader, entry: Any, where: str) -> Divergence:
    values = reader.table(entry, where)
    known: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(Divergence).items():
        value = values.get(name.rstrip("_"))
        options = typing.get_args(hint)
        is_integer = hint is int or int in options
        if value is None and type(None) in options:
            known[name] = None
        elif type(value) is (int if is_integer else str):
            known[name] = value
        else:
            raise reader.refuse(f"{where}.{name.rstrip('_')}", "an integer" if is_integer else "a text", value)
    reader.choice(known, "kind", where, KINDS)
    return Divergence(**known)


class _Reader:
    """Checked access to parsed JSON. Every method raises RecordingError that names the field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, field: str, expected: str, found: Any) -> RecordingError:
        """The error for a field that is not what it must be."""
        return RecordingError(f"{field} is damaged", expected=expected, found=repr(found)[:200], where=self.where)

    def table(self, value: Any, field: str) -> dict[str, Any]:
        """A JSON object."""
        if not isinstance(value, dict):
            raise self.refuse(field, "an object", value)
        return value

    def array(self, value: Any, field: str) -> list[Any]:
        """A JSON array."""
        if not isinstance(value, list):
            raise self.refuse(field, "an array", value)
        return value

    def text(self, values: dict[str, Any], name: str, where: str) -> str:
        """A text."""
        value = values.get(name)
        if not isinstance(value, str):
            raise self.refuse(f"{where}.{name}", "a text", value)
        return value

    def optional_text(self, values: dict[str, Any], name: str, where: str) -> str | None:
        """A text or null."""
        return None if values.get(name) is None else self.text(values, name, where)

    def texts(self, value: Any, field: str) -> list[str]:
        """An array of texts."""
        if not all(isinstance(item, str) for item in self.array(value, field)):
            raise self.refuse(field, "an array of texts", value)
        return list(value)

    def number(self, values: dict[str, Any], name: str, where: str) -> int:
        """An integer of zero or more. `true` is none."""
        value = values.get(name)
        if type(value) is not int or value < 0:
            raise self.refuse(f"{where}.{name}", "an integer, zero or more", value)
        return value

    def choice(self, values: dict[str, Any], name: str, where: str, options: typing.Sequence[str]) -> str:
        """One of some texts."""
        value = values.get(name)
        if value not in options:
            raise self.refuse(f"{where}.{name}", " or ".join(options), value)
        return str(value)

    def counts(self, value: Any, field: str) -> dict[str, int]:
        """A count for every kind."""
        values = self.table(value, field)
        return {kind: self.number(values, kind, field) for kind in KINDS}

    def kinds(self, value: Any, field: str) -> list[Any]:
        """An array of kinds."""
        if not set(self.texts(value, field)) <= set(KINDS):
            raise self.refuse(field, "kinds: " + ", ".join(KINDS), value)
        return list(value)

    def control(self, value: Any, field: str) -> dict[str, str | None]:
        """A verdict or null for each side."""
        values = self.table(value, field)
        verdicts = [verdict.value for verdict in Verdict]
        return {
            side: None if values.get(side) is None else self.choice(values, side, field, verdicts) for side in SIDES
        }

    def losses(self, value: Any, field: str) -> dict[str, list[str]]:
        """Hexadecimal floats for each side."""
        values = self.table(value, field)
        losses = {side: self.texts(values.get(side), f"{field}.{side}") for side in SIDES}
        for side, texts in losses.items():
            for text in texts:
                try:
                    float.fromhex(text)
                except (ValueError, OverflowError):
                    raise self.refuse(f"{field}.{side}", "hexadecimal floats", text) from None
        return losses


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
