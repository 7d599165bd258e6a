"""What comes of cases: verdicts, where two systems part, and times, as plain values."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from bitproof.harness.case import KINDS, USUAL_KINDS, Case, Kind
from bitproof.harness.records.artifact import Artifact
from bitproof.harness.records.divergence import BlamedCall, Divergence
from bitproof.harness.records.layout_bounds import LayoutBounds
from bitproof.harness.records.partition import Partition
from bitproof.harness.records.placed import Placed
from bitproof.harness.records.proof import ProofOutcome
from bitproof.harness.records.recording import ROLES, Key, Role
from bitproof.harness.records.sensitivity import Sensitivity
from bitproof.harness.records.throughput import Throughput
from bitproof.harness.ulps import Count, Histogram
from bitproof.harness.validate import GROWING, That

SCHEMA = 1

KindName = Annotated[str, That("kinds: " + ", ".join(KINDS), KINDS.__contains__, {"enum": list(KINDS)})]
Pair = Annotated[list[int], That("two integers", lambda found: len(found) == 2, {"minItems": 2, "maxItems": 2})]


class Verdict(enum.StrEnum):
    """The outcome of a comparison. Only EQUAL says that every bit was seen and agreed.

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
    a bit; with another environment's a recording is NOT COMPARABLE. MISSING stands for both NOT COMPARABLE and NO
    BASELINE where a call demands a baseline of this environment. UNVERIFIED says that evidence is missing.
    """

    EQUAL = "EQUAL"
    DRIFTED = "DRIFTED"
    NOT_COMPARABLE = "NOT COMPARABLE"
    NO_BASELINE = "NO BASELINE"
    MISSING = "MISSING"
    UNVERIFIED = "UNVERIFIED"


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """How far apart two systems are, measured over every element of every recorded tensor.

    Where the case expects DIFFERENT, of every tensor of the first differing step.

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
    histogram: dict[KindName, Histogram]
    first_beyond: Key | None = None
    first_beyond_error: float | None = None

    @property
    def is_within(self) -> bool:
        """Whether every tensor is within the bound."""
        return not self.tensors_beyond and self.largest_error is not None and self.largest_error <= self.bound


Step = Annotated[
    str, That("steps as decimal numbers", re.compile("[0-9]{1,9}").fullmatch, {"allOf": [{"pattern": "^[0-9]{1,9}$"}]})
]
Differing = dict[KindName, dict[str, dict[Step, list[Count]]]]
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
    """A count of nothing for every kind that any case may have."""
    return dict.fromkeys(USUAL_KINDS, 0)


@dataclass(frozen=True)
class PassReport:
    """What one pass did: seconds it took, verification left out, nodes before and after, and its own facts.

    `settings` is what decides what it does, as JSON values: it stands in a recording's manifest. `changed`
    has, for each operator whose number changed, how many calls there were before and after.
    """

    __pydantic_config__ = GROWING

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Pair] = field(default_factory=dict)


@dataclass(kw_only=True)
class CaseSeconds:
    """Where a case's time went, in seconds; None for what was not measured.

    `passes` has each pass by name; the tables by side have its steps of a second run (`control`, `stress`), the time
    until its ranks had started, and what recording took of its steps, which `reference` and `candidate` hold.
    """

    __pydantic_config__ = GROWING

    trace: float | None = None
    passes: dict[str, float | None] | None = None
    reference: float | None = None
    candidate: float | None = None
    compare: float | None = None
    start_ranks: dict[str, float | None] | None = None
    record: dict[str, float | None] | None = None
    closeness: float | None = None
    control: dict[str, float | None] | None = None
    stress: dict[str, float | None] | None = None
    replay: float | None = None
    total: float | None = None

    def note(self, table: Literal["start_ranks", "record", "control", "stress"], side: Role, seconds: float) -> None:
        """Put a side's seconds into a table."""
        setattr(self, table, (getattr(self, table) or {}) | {side: seconds})

    def known(self) -> dict[str, float | dict[str, float | None]]:
        """What was measured, by name, in the order in which it was."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(kw_only=True)
class Drift:
    """How one tensor drifted: how many of its records differ, the first of them, and what their values tell.

    Of `measured` records both sides keep the value. `elements`, `elements_differing` and `histogram` (elements that
    differ) are over all of them, `max_ulp` is the largest of them, and the bits are of the first of them.
    """

    __pydantic_config__ = GROWING

    kind: Kind
    name: str
    step: Count
    rank: Count
    records: Count
    measured: Count
    elements_differing: Count | None = None
    elements: Count | None = None
    max_ulp: Count | None = None
    reference_bits: str | None = None
    candidate_bits: str | None = None
    reference_type: str
    candidate_type: str
    histogram: Histogram


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """What a system's baselines say of its recording.

    `path` is the baseline's folder, None where there is none; `reasons` say why it is not EQUAL. `compared` and
    `mismatched` are numbers of records, `tensors_drifted` of tensors, and `drift` tells of the first of these. `call`
    is the operator call that moved, the first that gives another output than the baseline's, where that is known.
    """

    __pydantic_config__ = GROWING

    status: BaselineStatus
    path: str | None = None
    reasons: list[str] = field(default_factory=list)
    compared: Count = 0
    mismatched: Count = 0
    tensors_drifted: Count = 0
    drift: list[Drift] = field(default_factory=list)
    call: BlamedCall | None = None


_OBJECTIONS = (BaselineStatus.DRIFTED, BaselineStatus.MISSING, BaselineStatus.UNVERIFIED)


@dataclass(kw_only=True)
class CaseFindings:
    """What a case's result and its entry in report.json hold alike.

    `error` is a failure's whole text, rank traceback included. `memory` has each side's peak of allocated device memory
    during the steps, in MiB, None on a CPU. `differing` has the first MAX_DIFFERING keys that differ, in the order of
    computation, and `differing_left_out` says how many more there are. `baseline` has each side that was held against
    its baseline. `kept_graph`: an earlier run had traced the graph; None where no graph was made. `proof` is what a
    proof said before, `sensitivity` how much is seen, None where not asked. `partition` of a divided graph, `artifact`
    of the precompiled step, `placed` of placements solved for, `throughput` how fast each side's first run was,
    `layouts` what two layouts had to agree in.
    """

    verdict: Verdict
    error: str | None = None
    passes: list[PassReport] = field(default_factory=list)
    memory: dict[str, float | None] = field(default_factory=dict)
    differing: Differing = field(default_factory=dict)
    differing_left_out: Count = 0
    baseline: dict[Role, BaselineResult] = field(default_factory=dict)
    proof: ProofOutcome | None = None
    kept_graph: bool | None = None
    sensitivity: Sensitivity | None = None
    partition: Partition | None = None
    artifact: Artifact | None = None
    placed: Placed | None = None
    throughput: dict[Role, Throughput] = field(default_factory=dict)
    layouts: LayoutBounds | None = None


@dataclass(kw_only=True)
class CaseResult(CaseFindings):
    """One case's line in the report.

    `control` says how each side's two runs compare, None where it ran once; `stress` the same of a plain run and one
    under stress. `logs` are paths within the run folder. `options`, where not the report's, are of the run that the
    case was merged from. `remarks` are what readers must know of how much the agreement shows. `collectives`: where
    ranks met, "shared" for memory that they share; `backend` is torch's default group's.
    """

    case: Case
    steps: int
    world_size: int
    device: str
    backend: str
    compared: dict[str, int] = field(default_factory=zero_counts)
    mismatched: dict[str, int] = field(default_factory=zero_counts)
    differing_kinds: tuple[Kind, ...] = ()
    control: dict[Role, str | None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    losses: dict[Role, list[str]] = field(default_factory=lambda: {role: [] for role in ROLES})
    first_divergence: Divergence | None = None
    seconds: CaseSeconds = field(default_factory=CaseSeconds)
    closeness: Closeness | None = None
    stress: dict[Role, str | None] | None = None
    logs: list[str] = field(default_factory=list)
    options: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()
    collectives: str | None = None

    @property
    def where(self) -> str:
        """On what the case ran, in words."""
        meeting = ", shared memory" if self.collectives == "shared" else ""
        return f"{self.world_size} ranks, {self.steps} steps, {self.device}, {self.backend}{meeting}"

    @property
    def as_expected(self) -> bool:
        """Whether the case got its verdict, differs as it says it should, and no baseline objects.

        To differ so is to differ in exactly the kinds that the case lists, and by no more than it states. A case that
        expects CLOSE names no kinds and is content with EQUAL, which is within any bound.
        """
        return self.agrees_as_expected and not any(map(self.sides_with, _OBJECTIONS))

    @property
    def agrees_as_expected(self) -> bool:
        """As `as_expected`, without regard to baselines."""
        if self.case.expected == "CLOSE":
            return self.verdict in (Verdict.CLOSE, Verdict.EQUAL)
        if self.is_beyond_bound:
            return False
        return self.verdict == self.case.expected and set(self.differing_kinds) == set(self.case.differs)

    @property
    def is_beyond_bound(self) -> bool:
        """Whether the systems differ, and no measurement shows that it is by no more than an expected DIFFERENT may."""
        bound, found = self.case.differs_within, self.closeness
        if bound is None or self.verdict != Verdict.DIFFERENT:
            return False
        return found is None or found.bound != bound or not found.is_within

    def sides_with(self, status: BaselineStatus) -> list[Role]:
        """The sides that stand so to their baseline."""
        return [side for side, found in self.baseline.items() if found.status == status]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that began while cases run. A case's `system` runs as an `arm`: first, control, stress, replay1, ...

    "prepare" and "prepared" are of a graph, "start" of ranks; "step" has a `step`, from 0, of `steps`.
    """

    event: Literal["prepare", "prepared", "start", "step", "compare"]
    case: str = ""
    system: str = ""
    arm: str = "first"
    step: int = 0
    steps: int = 0
