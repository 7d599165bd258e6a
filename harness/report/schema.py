"""The fields of report.json as types. A report is checked against them, and report.schema.json is generated from them.

    python -m bitproof.harness.report.schema > harness/report/report.schema.json

In the file, a divergence also has the fields of its tensor and of the blamed call. The fields of that call's output
have the prefix `output_`. Fields with a default were added after the first reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal

from bitproof.harness.case import KINDS, USUAL_KINDS, Case, Kind
from bitproof.harness.errors import CaseError
from bitproof.harness.records import (
    BlamedCall,
    CaseFindings,
    CaseResult,
    CaseSeconds,
    ChainLink,
    Closeness,
    Count,
    Divergence,
    Histogram,
    Key,
    KindName,
    Report,
    Role,
    Sample,
    Score,
    TensorDifference,
    Verdict,
    Verification,
)
from bitproof.harness.validate import GROWING, That, Whole, json_schema


def _is_hex_float(text: str) -> bool:
    try:
        float.fromhex(text)
    except (ValueError, OverflowError):
        return False
    return True


def _stays_in_logs(path: str) -> bool:
    return path.startswith("logs/") and ".." not in path.split("/")


# No run writes other values; they appear next to verdicts, and readers trust them as ours.
Device = Literal["cpu", "cuda", "auto", "unknown"]
Backend = Literal["gloo", "nccl", "unknown"]
Collectives = Literal["shared", "gloo", "nccl", "native"]
RunId = Annotated[
    str,
    That(
        "a run's id, such as 20260102T030405Z-abcdef: letters, digits, dots, dashes and underscores",
        re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch,
        {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"},
    ),
]
FlatSample = tuple[list[Count], str, str]
WholeCase = Annotated[Case, Whole("a case", CaseError)]
Size = Annotated[float, That("a finite number, zero or more", lambda size: size >= 0, {"minimum": 0})]
Loss = Annotated[str, That("hexadecimal floats", _is_hex_float)]
LogPath = Annotated[str, That("paths within logs/", _stays_in_logs, {"pattern": "^logs/"})]
Counts = Annotated[
    dict[str, Count], That("a count for every kind", set(USUAL_KINDS).issubset, {"required": list(USUAL_KINDS)})
]
"""Counts by kind. Rare kinds only appear if they were compared."""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """For each system, the verdict of comparing its repeated run with its first run; None for a system that ran only
    once.
    """

    __pydantic_config__ = GROWING

    reference: Verdict | None = None
    candidate: Verdict | None = None

    @staticmethod
    def of(found: Mapping[Role, str | None]) -> Verdicts:
        return Verdicts(**{role: None if verdict is None else Verdict(verdict) for role, verdict in found.items()})


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of rank 0 in each system, as hexadecimal floats."""

    __pydantic_config__ = GROWING

    reference: list[Loss]
    candidate: list[Loss]


@dataclass(frozen=True, kw_only=True)
class FlatKey:
    """The key of a record."""

    __pydantic_config__ = GROWING

    step: Count
    kind: Kind
    name: str
    rank: Count

    @staticmethod
    def of(key: Key) -> FlatKey:
        return FlatKey(**key._asdict())

    def key(self) -> Key:
        return Key(self.step, self.kind, self.name, self.rank)


@dataclass(frozen=True, kw_only=True)
class FlatCloseness:
    """How close the values of two systems are. `largest` and `first_beyond` are the keys of records."""

    __pydantic_config__ = GROWING

    bound: Size
    largest_error: Size | None = None
    largest: FlatKey
    tensors_beyond: Count
    histogram: dict[KindName, Histogram]
    first_beyond: FlatKey | None = None
    first_beyond_error: Size | None = None

    @staticmethod
    def of(found: Closeness) -> FlatCloseness:
        first = FlatKey.of(found.first_beyond) if found.first_beyond else None
        return FlatCloseness(**vars(found) | {"largest": FlatKey.of(found.largest), "first_beyond": first})

    def closeness(self) -> Closeness:
        first = self.first_beyond and self.first_beyond.key()
        return Closeness(**vars(self) | {"largest": self.largest.key(), "first_beyond": first})


@dataclass(frozen=True, kw_only=True)
class FlatDivergence(TensorDifference):
    """A divergence, its tensor and the blamed call as one object."""

    __pydantic_config__ = GROWING | {"alias_generator": lambda name: name.rstrip("_")}  # `pass` is a word of Python

    step: int
    rank: int
    kind: Kind
    name: str
    module: str | None = None
    direction: str | None = None
    chunk: int | None = None
    operator: str | None = None
    node: str | None = None
    pass_: str | None = None
    how: str | None = None
    source: str | None = None
    operator_rank: int | None = None
    operator_ranks: str | None = None
    output_elements_differing: int | None = None
    output_elements: int | None = None
    output_max_ulp: int | None = None
    output_reference_bits: str | None = None
    output_candidate_bits: str | None = None
    between: str | None = None
    holds: str | None = None
    micro_batch: int | None = None
    part: str | None = None
    chain: list[ChainLink] | None = None
    expected: str | None = None
    found: str | None = None
    verification: Verification | None = None
    samples: list[FlatSample] | None = None  # type: ignore[assignment]  # a NamedTuple would be read with less care
    output_histogram: Histogram | None = None
    output_samples: list[FlatSample] | None = None

    @staticmethod
    def of(divergence: Divergence) -> FlatDivergence:
        call = divergence.call
        # The tensor's fields are the file's as they are. The call's come next, and those of its output
        # last, with a prefix.
        flat = {name: getattr(divergence, name) for name in _PLACE} | vars(divergence.tensor)
        if call is not None:
            flat |= {_FLAT.get(name, name): value for name, value in vars(call).items() if name != "output"}
            flat |= {f"output_{name}": value for name, value in vars(call.output or _UNKNOWN).items()}
        return FlatDivergence(**{name: value for name, value in flat.items() if name in _FIELDS})

    def divergence(self) -> Divergence:
        found = vars(self)
        call = None
        # A call always has an operator, so without one there was no call.
        if self.operator is not None:
            facts: dict[str, Any] = {
                item.name: found.get(_FLAT.get(item.name, item.name)) for item in fields(BlamedCall)
            }
            call = BlamedCall(**facts | {"output": _known(_difference(found, "output_"))})
        return Divergence(**{name: found[name] for name in _PLACE}, tensor=_difference(found), call=call)


_UNKNOWN = TensorDifference()
_PLACE = ("step", "rank", "kind", "name", "pass_", "between", "holds")
# A divergence has a `rank` of its own, that of the tensor, so the ranks of the call have other names.
_FLAT = {"rank": "operator_rank", "ranks": "operator_ranks"}
_FIELDS = {item.name for item in fields(FlatDivergence)}


def _difference(found: dict[str, Any], prefix: str = "") -> TensorDifference:
    facts = {item.name: found.get(prefix + item.name) for item in fields(TensorDifference)}
    if facts["samples"] is not None:
        facts["samples"] = [Sample(*sample) for sample in facts["samples"]]
    return TensorDifference(**facts)


def _known(difference: TensorDifference) -> TensorDifference | None:
    return None if difference == _UNKNOWN else difference


@dataclass(kw_only=True)
class CaseEntry(CaseFindings):
    """A case's result as an entry of report.json.

    The name, the expected verdict and the systems are also in `case`, which has all settings.
    """

    __pydantic_config__ = GROWING

    name: str
    expected: str
    as_expected: bool = None  # type: ignore[assignment]  # not in the first reports
    reference: str
    candidate: str
    world_size: Count
    steps: Count
    device: Device
    backend: Backend
    compared: Counts
    mismatched: Counts
    differing_kinds: list[Kind] = field(default_factory=list)
    control: Verdicts
    losses: Losses
    first_divergence: FlatDivergence | None = None
    seconds: CaseSeconds
    closeness: FlatCloseness | None = None
    stress: Verdicts | None = None
    logs: list[LogPath] = field(default_factory=list)
    options: list[str] | None = None
    remarks: list[str] = field(default_factory=list)
    collectives: Collectives | None = None
    case: WholeCase

    @staticmethod
    def of(result: CaseResult) -> CaseEntry:
        case, first, closeness = result.case, result.first_divergence, result.closeness
        values: Any = vars(result) | {
            "name": case.name,
            "expected": case.expected,
            "as_expected": result.as_expected,
            "reference": case.reference,
            "candidate": case.candidate,
            "differing_kinds": list(result.differing_kinds),
            "control": Verdicts.of(result.control),
            "losses": Losses(**result.losses),
            "first_divergence": FlatDivergence.of(first) if first else None,
            "closeness": FlatCloseness.of(closeness) if closeness else None,
            "stress": None if result.stress is None else Verdicts.of(result.stress),
            "options": None if result.options is None else list(result.options),
            "remarks": list(result.remarks),
        }
        return CaseEntry(**values)

    def result(self) -> CaseResult:
        """Convert back to a case's result, without checking whether the fields contradict each other."""
        found = {name: value for name, value in vars(self).items() if name not in _OF_THE_CASE}
        return CaseResult(
            **found
            | {
                # Kinds are in the order of a step, and not in that of the file.
                "compared": {kind: self.compared[kind] for kind in KINDS if kind in self.compared},
                "mismatched": {kind: self.mismatched.get(kind, 0) for kind in KINDS if kind in self.compared},
                "differing_kinds": tuple(self.differing_kinds),
                "control": dict(vars(self.control)),
                "losses": dict(vars(self.losses)),
                "first_divergence": self.first_divergence and self.first_divergence.divergence(),
                "closeness": self.closeness and self.closeness.closeness(),
                "stress": self.stress and dict(vars(self.stress)),
                "options": None if self.options is None else tuple(self.options),
                "remarks": tuple(self.remarks),
            }
        )


_OF_THE_CASE = ("name", "expected", "as_expected", "reference", "candidate")


@dataclass(frozen=True, kw_only=True)
class ReportEntry:
    """A whole report: the top-level object of report.json."""

    __pydantic_config__ = GROWING

    schema: Literal[1, 2]
    run_id: RunId
    exit_status: Count
    environment: dict[str, Any]
    options: list[str] = field(default_factory=list)
    cases: list[CaseEntry]
    not_run: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    faults: Score | None = None
    shard: str | None = None
    selection: list[WholeCase] | None = None
    left_out: list[WholeCase] = field(default_factory=list)

    @staticmethod
    def of(report: Report) -> ReportEntry:
        return ReportEntry(
            schema=2,
            run_id=report.run_id,
            exit_status=report.exit_status,
            environment=report.environment,
            options=list(report.options),
            cases=[CaseEntry.of(result) for result in report.cases],
            not_run=report.not_run,
            remarks=list(report.remarks),
            faults=report.faults,
            shard=str(report.shard) if report.shard else None,
            selection=list(report.shard.selection) if report.shard else None,
            left_out=list(report.left_out),
        )


def plain(entry: Any) -> Any:
    """Convert an object of this module's classes to plain JSON values. Times that were not measured are left out."""
    # Of a case with a user's systems, only the stated settings are written: see `Case.stated`.
    if isinstance(entry, Case):
        return entry.stated()
    if isinstance(entry, CaseSeconds):
        return entry.known()
    if is_dataclass(entry):
        return {name.rstrip("_"): plain(value) for name, value in vars(entry).items()}
    if isinstance(entry, dict):
        return {name: plain(value) for name, value in entry.items()}
    return [plain(value) for value in entry] if isinstance(entry, (list, tuple)) else entry


def schema_text() -> str:
    # The title of a type is its class's name, which says nothing to a user.
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(about | json_schema(ReportEntry) | {"title": "report.json of bitproof"}, indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
