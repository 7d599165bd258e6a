"""What runs leave behind: recordings, verdicts and the report, as plain values.

Everything here can be written as JSON and read back; nothing here imports torch.
"""

from __future__ import annotations

import enum
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


def zero_counts() -> dict[str, int]:
    """A count of nothing for every kind."""
    return dict.fromkeys(KINDS, 0)


@dataclass(kw_only=True)
class CaseResult:
    """One case's line in the report. `error` holds a failure's whole text, rank traceback included.

    `memory` holds each side's peak of allocated device memory during the steps, in MiB, None on a CPU.
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


@dataclass(kw_only=True)
class Report:
    """One run: where it ran, what came of every case, and the status it ended with.

    `options` are the command line's, beyond the selection and the report folder: what a replay repeats.
    `not_run` has, by name, why each case that this machine cannot judge was left out.
    """

    run_id: str
    exit_status: int
    environment: dict[str, Any]
    cases: list[CaseResult]
    options: tuple[str, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
