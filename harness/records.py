"""What runs leave behind: recordings, verdicts and the report, as plain values.

Everything here can be written as JSON and read back; nothing here imports torch.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.case import KINDS, Case, Kind

SCHEMA = 1


class Verdict(enum.StrEnum):
    """What a comparison came to. Only EQUAL says that every bit was seen and agreed.

    CLOSE says that some bits differ, each tensor within the bound that the case states.
    """

    EQUAL = "EQUAL"
    CLOSE = "CLOSE"
    DIFFERENT = "DIFFERENT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    UNVERIFIED = "UNVERIFIED"
    ERROR = "ERROR"


class BaselineStatus(enum.StrEnum):
    """How a system's recording stands to its baseline, an earlier recording of the same system on the same case.

    EQUAL and DRIFTED are about a baseline of the same environment, of everything beside the code that can change
    a bit; with another environment's a recording is NOT COMPARABLE. UNVERIFIED says that evidence is missing.
    """

    EQUAL = "EQUAL"
    DRIFTED = "DRIFTED"
    NOT_COMPARABLE = "NOT COMPARABLE"
    NO_BASELINE = "NO BASELINE"
    UNVERIFIED = "UNVERIFIED"


class Key(NamedTuple):
    """The full name of one recorded tensor. Records pair by all four parts or not at all."""

    step: int
    kind: Kind
    name: str
    rank: int


class Record(NamedTuple):
    """One tensor of a recording: its digest, and enough to say how it differs before values are read.

    `digest` is 32 hexadecimal digits over dtype, shape and every byte in order; `value` is the
    hexadecimal float of a loss, else None.
    """

    digest: str
    dtype: str
    shape: tuple[int, ...]
    value: str | None = None


@dataclass
class Recording:
    """What one system did: a manifest of everything that can change a bit, and a record per key."""

    manifest: dict[str, Any]
    records: dict[Key, Record] = field(default_factory=dict)

    def losses(self, rank: int = 0) -> list[str]:
        """One rank's losses as hexadecimal floats, in step order."""
        keys = sorted(key for key in self.records if key.kind == "loss" and key.rank == rank)
        return [self.records[key].value or "" for key in keys]


@dataclass(kw_only=True)
class Divergence:
    """Where two systems first part. None marks what is not known.

    `step`, `rank`, `kind` and `name` are the first differing record, and `elements` to `candidate_type` are
    about its tensor. `module` to `node` are the operator call to blame: the first whose inputs agree and whose
    output does not. `how` says what is wrong with it; it ran on `operator_rank`, the lowest of the
    `operator_ranks` on which it differs, and is written at the line `source`; the `output_` fields are
    about its output.

    `between` is None for a reference and a candidate. Where one system parts from itself it says which, such as
    "reference against itself"; the fields of the two sides are then about its first and its second run.
    `histogram` counts the tensor's elements by ULPs, as Closeness does; dtypes without ULPs have none.
    `samples` are the first elements that differ: `[[1, 2], "0x3f800000", "0x40000000"]` has the index, the
    reference's bits and the candidate's. `neighbours` are the calls around the blamed one, in execution order.
    """

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
    elements_differing: int | None = None
    elements: int | None = None
    max_ulp: int | None = None
    reference_bits: str | None = None
    candidate_bits: str | None = None
    reference_type: str | None = None
    candidate_type: str | None = None
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
    neighbours: list[dict[str, Any]] | None = None
    histogram: dict[str, int] | None = None
    samples: list[Any] | None = None
    output_histogram: dict[str, int] | None = None
    output_samples: list[Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The divergence with the report's key names (`pass` instead of `pass_`)."""
        return {name.rstrip("_"): value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """How far apart two systems are, measured over every element of every recorded tensor.

    A tensor's error is |r - c| / |r|; None stands for one that no finite number states: a NaN or an
    infinity on one side alone, a reference of zeros, or integers that differ. `largest` and `first_beyond`
    name the tensor of the largest error and the first, in the order of computation, beyond the bound.
    `histogram` counts, by kind, elements by ULPs between the two sides: "0", "1", "2", "3-4", "5-8", ...,
    and "unlike" for elements without a distance.
    """

    bound: float
    largest_error: float | None
    largest: Key
    tensors_beyond: int
    histogram: dict[str, dict[str, int]]
    first_beyond: Key | None = None
    first_beyond_error: float | None = None

    @property
    def is_within(self) -> bool:
        """Whether every tensor is within the bound."""
        return not self.tensors_beyond and self.largest_error is not None and self.largest_error <= self.bound


UNLIKE = "unlike"


def ulp_bucket(power: int) -> str:
    """The name of the histogram's bucket that ends at 2^power ULPs: "1", "2", "3-4", "5-8", ..."""
    return str(2**power) if power < 2 else f"{2 ** (power - 1) + 1}-{2**power}"


BUCKETS = ("0", *(ulp_bucket(power) for power in range(65)), UNLIKE)
"""Every bucket of a ULP histogram, in order."""


Differing = dict[str, dict[str, dict[str, list[int]]]]
"""The ranks on which a tensor differs, by kind, name and step; steps are texts, as keys of JSON objects are."""

MAX_DIFFERING = 20_000
"""How many differing keys of one case a report has."""


def group_keys(keys: Iterable[Key]) -> Differing:
    """Keys by kind, name and step, in their own order."""
    grouped: Differing = {}
    for key in keys:
        grouped.setdefault(key.kind, {}).setdefault(key.name, {}).setdefault(str(key.step), []).append(key.rank)
    return grouped


def zero_counts() -> dict[str, int]:
    """A count of nothing for every kind."""
    return dict.fromkeys(KINDS, 0)


@dataclass(kw_only=True)
class CaseResult:
    """One case's line in the report. `error` holds a failure's whole text, rank traceback included.

    `memory` holds each side's peak of allocated device memory during the steps, in MiB, None on a CPU.
    `control` says what each side's two runs came to, None where it ran once; `stress` the same of a plain run and
    one under stress, None where nothing ran under stress.
    `differing` has the first MAX_DIFFERING keys that differ, in the order of computation, and
    `differing_left_out` says how many more there are. `logs` are paths within the run folder.
    `options`, where they are not the report's, are those of the run that the case was merged from.
    `baseline` holds, for each side that was held against its baseline, {"status", "path", "reasons", "compared",
    "mismatched", "tensors_drifted", "drift"}: a BaselineStatus, the baseline's folder or None, why it is not EQUAL,
    numbers of records and of tensors, and the first tensors that differ, as `harness.compare.drift` tells them.
    """

    case: Case
    verdict: Verdict
    steps: int
    world_size: int
    device: str
    backend: str
    compared: dict[str, int] = field(default_factory=zero_counts)
    mismatched: dict[str, int] = field(default_factory=zero_counts)
    differing_kinds: tuple[Kind, ...] = ()
    control: dict[str, str | None] = field(default_factory=lambda: {"reference": None, "candidate": None})
    losses: dict[str, list[str]] = field(default_factory=lambda: {"reference": [], "candidate": []})
    first_divergence: Divergence | None = None
    error: str | None = None
    seconds: dict[str, Any] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    closeness: Closeness | None = None
    memory: dict[str, float | None] = field(default_factory=dict)
    stress: dict[str, str | None] | None = None
    differing: Differing = field(default_factory=dict)
    differing_left_out: int = 0
    logs: list[str] = field(default_factory=list)
    options: tuple[str, ...] | None = None
    baseline: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def as_expected(self) -> bool:
        """Whether the case got its verdict, differs in exactly the kinds it says it should, and no baseline objects.

        A case that expects CLOSE names no kinds and is content with EQUAL, which is within any bound.
        """
        if any(self.sides_with(status) for status in (BaselineStatus.DRIFTED, BaselineStatus.UNVERIFIED)):
            return False
        if self.case.expected == "CLOSE":
            return self.verdict in (Verdict.CLOSE, Verdict.EQUAL)
        return self.verdict == self.case.expected and set(self.differing_kinds) == set(self.case.differs)

    def sides_with(self, status: BaselineStatus) -> list[str]:
        """The sides that stand so to their baseline."""
        return [side for side, found in self.baseline.items() if found["status"] == status]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What part of a selection one machine ran: number `index`, counted from 1, of `count`."""

    index: int
    count: int
    selection: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @staticmethod
    def parse(text: str, selection: Iterable[Case]) -> Shard | None:
        """The shard that a text such as `2/4` names; None for any other text."""
        found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
        if found is None or int(found[1]) > int(found[2]):
            return None
        return Shard(index=int(found[1]), count=int(found[2]), selection=tuple(selection))


@dataclass(kw_only=True)
class Report:
    """One run: where it ran, what came of every case, and the status it ended with.

    `options` are the command line's, beyond the selection and the report folder: what a replay repeats.
    `not_run` has, by name, why each case that this machine cannot judge was left out; `remarks` are what readers
    must know of how every case was run. `shard` says what else was selected, where the cases are one machine's part.
    """

    run_id: str
    exit_status: int
    environment: dict[str, Any]
    cases: list[CaseResult]
    options: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    shard: Shard | None = None
