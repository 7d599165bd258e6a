"""report.json: the truth of a run, written from a Report and read back with nothing taken on trust.

A file from disk is data: it is parsed as JSON, bounded in size, and checked field by field. One that
is damaged, or that claims more than its own numbers show, raises RecordingError.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from harness.case import KINDS, Case, Kind
from harness.errors import CaseError, RecordingError
from harness.records import (
    BUCKETS,
    SCHEMA,
    UNLIKE,
    BaselineStatus,
    CaseResult,
    Closeness,
    Differing,
    Divergence,
    Key,
    Report,
    Shard,
    Verdict,
)
from harness.report.status import WRONG_CALL, exit_status

FILE_NAME = "report.json"
MAX_BYTES = 64 * 2**20
SIDES = ("reference", "candidate")
EVERY_CASE_HAS = ("loss", "grad", "param", "optimizer")


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
        "not_run": report.not_run,
        "remarks": list(report.remarks),
        "shard": str(report.shard) if report.shard else None,
        "selection": [case.to_dict() for case in report.shard.selection] if report.shard else None,
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
        not_run=reader.reasons(top.get("not_run", {}), "report.not_run"),
        remarks=tuple(reader.texts(top.get("remarks", []), "report.remarks")),
        shard=_shard(reader, top),
    )
    if ran := sorted(report.not_run.keys() & {result.case.name for result in report.cases}):
        raise reader.refuse("report.not_run", "cases that have no result", ran[0])
    status = exit_status(report.cases, is_shard=report.shard is not None)
    if report.exit_status not in (status, WRONG_CALL):
        raise reader.refuse("report.exit_status", f"{status}, by its cases", report.exit_status)
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
        "closeness": _closeness_to_dict(result.closeness) if result.closeness else None,
        "memory": result.memory,
        "stress": result.stress,
        "differing": result.differing,
        "differing_left_out": result.differing_left_out,
        "logs": result.logs,
        "options": None if result.options is None else list(result.options),
        "baseline": result.baseline,
        "case": result.case.to_dict(),
    }


def _closeness_to_dict(closeness: Closeness) -> dict[str, Any]:
    keys = {name: getattr(closeness, name) for name in ("largest", "first_beyond")}
    return dict(vars(closeness)) | {name: key and key._asdict() for name, key in keys.items()}


def _case_from_dict(reader: _Reader, entry: Any, where: str) -> CaseResult:
    values = reader.table(entry, where)
    divergence, options = values.get("first_divergence"), values.get("options")
    result = CaseResult(
        case=reader.case(values.get("case"), f"{where}.case"),
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
        memory=reader.table(values.get("memory", {}), f"{where}.memory"),
        passes=[
            _pass(reader, item, f"{where}.passes[{index}]")
            for index, item in enumerate(reader.array(values.get("passes", []), f"{where}.passes"))
        ],
        closeness=_closeness(reader, values.get("closeness"), f"{where}.closeness"),
        stress=None if values.get("stress") is None else reader.control(values["stress"], f"{where}.stress"),
        differing=_differing(reader, values.get("differing", {}), f"{where}.differing"),
        differing_left_out=reader.number(values, "differing_left_out", where) if "differing_left_out" in values else 0,
        logs=_logs(reader, values.get("logs", []), f"{where}.logs"),
        options=None if options is None else tuple(reader.texts(options, f"{where}.options")),
        baseline=_baselines(reader, values.get("baseline", {}), f"{where}.baseline"),
    )
    _refuse_contradictions(reader, values, result, where)
    return result


def _shard(reader: _Reader, top: dict[str, Any]) -> Shard | None:
    """Which part of what selection the report is of; None for a whole run."""
    if (name := top.get("shard")) is None:
        return None
    cases = enumerate(reader.array(top.get("selection"), "report.selection"))
    shard = Shard.parse(str(name), [reader.case(entry, f"report.selection[{index}]") for index, entry in cases])
    if shard is None:
        raise reader.refuse("report.shard", "a text such as 2/4", name)
    return shard


def _refuse_contradictions(reader: _Reader, values: dict[str, Any], result: CaseResult, where: str) -> None:
    """A verdict that its own evidence does not carry is worse than none."""
    case = result.case
    for name in ("name", "expected", "reference", "candidate"):
        if values.get(name) != getattr(case, name):
            raise reader.refuse(f"{where}.{name}", f"{getattr(case, name)!r}, by its case", values.get(name))
    if result.differing or result.differing_left_out:
        _refuse_miscounted(reader, result, where)
    is_equal = result.verdict == Verdict.EQUAL
    has_difference = any(result.mismatched.values()) or result.differing_kinds or result.first_divergence is not None
    if is_equal and has_difference:
        raise reader.refuse(f"{where}.verdict", "no EQUAL, as records differ", result.verdict.value)
    is_close = result.verdict == Verdict.CLOSE
    if (is_equal or is_close) and not all(result.compared[kind] for kind in EVERY_CASE_HAS):
        raise reader.refuse(
            f"{where}.verdict", f"no {result.verdict}, as a kind was not compared", result.verdict.value
        )
    if is_close:
        _refuse_unfounded_close(reader, result, where)
    repeated = [verdict for verdicts in (result.control, result.stress or {}) for verdict in verdicts.values()]
    unstable = [verdict for verdict in repeated if verdict not in (None, Verdict.EQUAL)]
    if unstable and result.verdict in (Verdict.EQUAL, Verdict.CLOSE, Verdict.DIFFERENT):
        raise reader.refuse(
            f"{where}.verdict", f"no {result.verdict}, as a control is {unstable[0]}", result.verdict.value
        )
    if result.verdict == Verdict.DIFFERENT and not any(result.mismatched.values()):
        raise reader.refuse(f"{where}.verdict", "no DIFFERENT, as no record differs", result.verdict.value)


def _refuse_miscounted(reader: _Reader, result: CaseResult, where: str) -> None:
    """Differing keys must lie within the case, and be as many as the mismatched records."""
    places = [
        (kind, int(step), rank)
        for kind, names in result.differing.items()
        for steps in names.values()
        for step, ranks in steps.items()
        for rank in ranks
    ]
    expected = sum(result.mismatched.values())
    if len(places) + result.differing_left_out != expected:
        raise reader.refuse(f"{where}.differing", f"{expected} keys, by the mismatched records", len(places))
    for kind, step, rank in places:
        if step >= result.steps or rank >= result.world_size:
            raise reader.refuse(f"{where}.differing.{kind}", "steps and ranks of the case", f"step {step}, rank {rank}")


def _refuse_unfounded_close(reader: _Reader, result: CaseResult, where: str) -> None:
    """CLOSE needs a bound, something that differs, and values of every compared kind measured within the bound."""
    bound, closeness = result.case.close_within, result.closeness
    unstable = [verdict for verdict in result.control.values() if verdict not in (None, Verdict.EQUAL)]
    expected = None
    if bound is None:
        expected = "no CLOSE, as the case states no bound"
    elif closeness is None or closeness.bound != bound or not closeness.is_within:
        expected = f"no CLOSE, as no evidence shows every tensor within {bound:g}"
    elif not any(result.mismatched.values()):
        expected = "no CLOSE, as no record differs"
    elif unstable:
        expected = f"no CLOSE, as a control is {unstable[0]}"
    elif {kind for kind, count in result.compared.items() if count} != closeness.histogram.keys():
        expected = "no CLOSE, as the histogram lacks a compared kind"
    elif any(UNLIKE in buckets for buckets in closeness.histogram.values()):
        expected = "no CLOSE, as elements are unlike"
    if expected is not None:
        raise reader.refuse(f"{where}.verdict", expected, result.verdict.value)


def _closeness(reader: _Reader, entry: Any, where: str) -> Closeness | None:
    if entry is None:
        return None
    values = reader.table(entry, where)
    histogram = reader.table(values.get("histogram"), f"{where}.histogram")
    reader.kinds(list(histogram), f"{where}.histogram")
    for kind, buckets in histogram.items():
        _buckets(reader, buckets, f"{where}.histogram.{kind}")
    first_beyond, bound = values.get("first_beyond"), reader.size(values, "bound", where)
    if bound is None:
        raise reader.refuse(f"{where}.bound", "a finite number, zero or more", bound)
    return Closeness(
        bound=bound,
        largest_error=reader.size(values, "largest_error", where),
        largest=_key(reader, values.get("largest"), f"{where}.largest"),
        tensors_beyond=reader.number(values, "tensors_beyond", where),
        histogram=histogram,
        first_beyond=None if first_beyond is None else _key(reader, first_beyond, f"{where}.first_beyond"),
        first_beyond_error=reader.size(values, "first_beyond_error", where),
    )


def _buckets(reader: _Reader, entry: Any, where: str) -> dict[str, int]:
    """Counts of elements by ULPs."""
    buckets = reader.table(entry, where)
    for bucket in buckets:
        if bucket not in BUCKETS:
            raise reader.refuse(where, "ranges of ULPs such as 3-4", bucket)
        reader.number(buckets, bucket, where)
    return buckets


def _differing(reader: _Reader, entry: Any, where: str) -> Differing:
    """Ranks by kind, name and step."""
    kinds = reader.table(entry, where)
    reader.kinds(list(kinds), where)
    for kind, names in kinds.items():
        for name, steps in reader.table(names, f"{where}.{kind}").items():
            for step, ranks in reader.table(steps, f"{where}.{kind}.{name}").items():
                if not re.fullmatch("[0-9]{1,9}", step):
                    raise reader.refuse(f"{where}.{kind}.{name}", "steps as decimal numbers", step)
                reader.integers(ranks, f"{where}.{kind}.{name}.{step}")
    return kinds


def _logs(reader: _Reader, entry: Any, where: str) -> list[str]:
    """Paths that stay within the run folder: they become links."""
    paths = reader.texts(entry, where)
    for path in paths:
        if not path.startswith("logs/") or ".." in path.split("/"):
            raise reader.refuse(where, "paths within logs/", path)
    return paths


def _samples(reader: _Reader, entry: Any, where: str) -> list[Any]:
    """Elements that differ: index, reference's bits, candidate's bits."""
    for number, sample in enumerate(reader.array(entry, where)):
        field = f"{where}[{number}]"
        if len(reader.array(sample, field)) != 3:
            raise reader.refuse(field, "an index and two texts", sample)
        reader.integers(sample[0], f"{field}[0]")
        reader.texts(sample[1:], field)
    return list(entry)


def _neighbours(reader: _Reader, entry: Any, where: str) -> list[dict[str, Any]]:
    """Calls around the blamed one."""
    return [reader.table(call, f"{where}[{number}]") for number, call in enumerate(reader.array(entry, where))]


_DIVERGENCE_TABLES: dict[str, Callable[[_Reader, Any, str], Any]] = {
    "neighbours": _neighbours,
    "histogram": _buckets,
    "samples": _samples,
    "output_histogram": _buckets,
    "output_samples": _samples,
}


def _baselines(reader: _Reader, entry: Any, where: str) -> dict[str, dict[str, Any]]:
    values = reader.table(entry, where)
    if unknown := sorted(values.keys() - set(SIDES)):
        raise reader.refuse(where, " and ".join(SIDES), unknown[0])
    return {side: _baseline(reader, values[side], f"{where}.{side}") for side in values}


def _baseline(reader: _Reader, entry: Any, where: str) -> dict[str, Any]:
    values = reader.table(entry, where)
    status = reader.choice(values, "status", where, [status.value for status in BaselineStatus])
    counts = {name: reader.number(values, name, where) for name in ("compared", "mismatched", "tensors_drifted")}
    found = counts | {
        "status": status,
        "path": reader.optional_text(values, "path", where),
        "reasons": reader.texts(values.get("reasons"), f"{where}.reasons"),
        "drift": [
            _drift(reader, item, f"{where}.drift[{index}]")
            for index, item in enumerate(reader.array(values.get("drift"), f"{where}.drift"))
        ],
    }
    if status == BaselineStatus.EQUAL and (not counts["compared"] or counts["mismatched"] or found["drift"]):
        raise reader.refuse(f"{where}.status", "no EQUAL, as records differ or none was compared", status)
    if status == BaselineStatus.DRIFTED and not counts["mismatched"]:
        raise reader.refuse(f"{where}.status", "no DRIFTED, as no record differs", status)
    return found


def _drift(reader: _Reader, entry: Any, where: str) -> dict[str, Any]:
    values = reader.table(entry, where)
    reader.choice(values, "kind", where, KINDS)
    for name in ("name", "reference_type", "candidate_type"):
        reader.text(values, name, where)
    for name in ("step", "rank", "records", "measured"):
        reader.number(values, name, where)
    unknown = dict.fromkeys(("elements", "elements_differing", "max_ulp", "reference_bits", "candidate_bits"))
    values = unknown | values
    for name in ("elements", "elements_differing", "max_ulp"):
        if values[name] is not None:
            reader.number(values, name, where)
    for name in ("reference_bits", "candidate_bits"):
        reader.optional_text(values, name, where)
    _buckets(reader, values.get("histogram"), f"{where}.histogram")
    return values


def _key(reader: _Reader, entry: Any, where: str) -> Key:
    values = reader.table(entry, where)
    kind = cast(Kind, reader.choice(values, "kind", where, KINDS))
    step, rank = (reader.number(values, name, where) for name in ("step", "rank"))
    return Key(step, kind, reader.text(values, "name", where), rank)


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
        elif name in _DIVERGENCE_TABLES:
            known[name] = _DIVERGENCE_TABLES[name](reader, value, f"{where}.{name}")
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

    def case(self, value: Any, field: str) -> Case:
        """A case, whole."""
        try:
            return Case.from_dict(self.table(value, field))
        except (CaseError, TypeError, ValueError) as error:
            raise RecordingError(f"{field} is not a case", found=str(error), where=self.where) from error

    def texts(self, value: Any, field: str) -> list[str]:
        """An array of texts."""
        if not all(isinstance(item, str) for item in self.array(value, field)):
            raise self.refuse(field, "an array of texts", value)
        return list(value)

    def integers(self, value: Any, field: str) -> list[int]:
        """An array of integers of zero or more."""
        if not all(type(item) is int and item >= 0 for item in self.array(value, field)):
            raise self.refuse(field, "an array of integers, zero or more", value)
        return list(value)

    def reasons(self, value: Any, field: str) -> dict[str, str]:
        """A text for each name."""
        values = self.table(value, field)
        return {name: self.text(values, name, field) for name in values}

    def number(self, values: dict[str, Any], name: str, where: str) -> int:
        """An integer of zero or more. `true` is none."""
        value = values.get(name)
        if type(value) is not int or value < 0:
            raise self.refuse(f"{where}.{name}", "an integer, zero or more", value)
        return value

    def size(self, values: dict[str, Any], name: str, where: str) -> float | None:
        """A finite number of zero or more, or null."""
        value = values.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise self.refuse(f"{where}.{name}", "a finite number, zero or more", value)
        return None if value is None else float(value)

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
