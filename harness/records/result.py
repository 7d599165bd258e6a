"""The results of cases as plain values: verdicts, divergences, and times."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from bitproof.harness.case import KINDS, USUAL_KINDS, Case, Kind
from bitproof.harness.records.artifact import Artifact
from bitproof.harness.records.divergence import Divergence
from bitproof.harness.records.finding import Finding
from bitproof.harness.records.layout_bounds import LayoutBounds
from bitproof.harness.records.partition import Partition
from bitproof.harness.records.placed import Placed
from bitproof.harness.records.recording import ROLES, Key, Role
from bitproof.harness.records.throughput import Throughput
from bitproof.harness.ulps import Count, Histogram
from bitproof.harness.validate import GROWING, That

# The version of the form of JSON files other than report.json, such as localize.json.
SCHEMA = 1

KindName = Annotated[str, That("kinds: " + ", ".join(KINDS), KINDS.__contains__, {"enum": list(KINDS)})]
Pair = Annotated[list[int], That("two integers", lambda found: len(found) == 2, {"minItems": 2, "maxItems": 2})]


class Verdict(enum.StrEnum):
    """The outcome of a comparison. Only EQUAL means that every bit was compared and agreed.

    CLOSE means that some bits differ, with each tensor within the case's bound.
    """

    EQUAL = "EQUAL"
    CLOSE = "CLOSE"
    DIFFERENT = "DIFFERENT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    UNVERIFIED = "UNVERIFIED"
    ERROR = "ERROR"


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """The distance between two systems, measured over every element of every recorded tensor.

    If the case expects DIFFERENT, only the first differing step is measured. A tensor's error is |r - c| / |r|, None if
    that is not finite.

    - `largest`: the tensor with the largest error.
    - `first_beyond`: the first tensor, in the order of computation, whose error exceeds the bound.
    - `histogram`: for each kind, the number of elements by distance in ULPs: "0", "1", "2", "3-4", ..., and "unlike"
      for elements without a distance.
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
        # An error of None is not finite, and so beyond any bound.
        return not self.tensors_beyond and self.largest_error is not None and self.largest_error <= self.bound


Step = Annotated[
    str, That("steps as decimal numbers", re.compile("[0-9]{1,9}").fullmatch, {"allOf": [{"pattern": "^[0-9]{1,9}$"}]})
]
Differing = dict[KindName, dict[str, dict[Step, list[Count]]]]
"""kind -> name -> step -> ranks on which the tensor differs. Steps are strings, as keys of JSON objects must be."""

MAX_DIFFERING = 20_000
"""The most differing keys of a case in a report."""


def group_keys(keys: Iterable[Key]) -> Differing:
    """Convert keys to nested dicts: kind -> name -> step -> ranks, in the order of the keys."""
    grouped: Differing = {}
    for key in keys:
        grouped.setdefault(key.kind, {}).setdefault(key.name, {}).setdefault(str(key.step), []).append(key.rank)
    return grouped


def zero_counts() -> dict[str, int]:
    """Return a dict with a count of 0 for each usual kind of record. Rare kinds are added only if they are compared."""
    return dict.fromkeys(USUAL_KINDS, 0)


STAGES = "stages"
"""The key, in a pass's facts, of the list with its facts about each stage of a pipeline."""


@dataclass(frozen=True)
class PassReport:
    """A pass that ran: its seconds without verification, and the number of nodes before and after.

    - `settings`: the settings that determine its effect, as JSON values.
    - `changed`: for each operator whose count changed, the number of calls before and after.
    - `facts`: facts that the pass reports. If the model has pipeline stages, this has a list with the facts of each
      stage, and all numbers of the pass are sums over stages.
    """

    __pydantic_config__ = GROWING

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Pair] = field(default_factory=dict)

    @property
    def by_stage(self) -> list[dict[str, Any]]:
        """The pass's facts, a dictionary per stage; without stages, a single dictionary."""
        stages: list[dict[str, Any]] = self.facts.get(STAGES, [self.facts])
        return stages


@dataclass(kw_only=True)
class CaseSeconds:
    """A case's time by part, in seconds; None if not measured.

    - `passes`: the time of each pass by name.
    - `reference`, `candidate`: the two systems' first runs, including recording.

    The following parts have a time for each system:

    - `control`: a second run.
    - `stress`: a run with random sleeps and other values in uninitialized memory.
    - `start_ranks`: the start of the ranks.
    - `record`: recording in the first run.
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
        """Store the seconds of the system in role `side` in the part `table`, which has a time for each system."""
        setattr(self, table, (getattr(self, table) or {}) | {side: seconds})

    def known(self) -> dict[str, float | dict[str, float | None]]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(kw_only=True)
class Drift:
    """The difference of a tensor between two recordings, such as a baseline and a new run.

    - `records`: the number of records of the tensor that differ.
    - `step`, `rank`: those of the first record that differs.
    - `measured`: the number of differing records whose values are stored in both recordings. The fields below describe
      only these records.
    - `elements`, `elements_differing`: the total numbers of elements, and of elements that differ.
    - `histogram`: the number of differing elements by distance.
    - `max_ulp`: the largest distance of two elements, in ULPs.
    - `reference_bits`, `candidate_bits`: the bits of the first differing element.
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


@dataclass(kw_only=True)
class CaseFindings:
    """The fields that a case's result shares with its entry in report.json.

    - `error`: a failure's whole text, including the rank's traceback.
    - `memory`: by system, the peak of allocated device memory in MiB; None on a CPU.
    - `differing`, `differing_left_out`: the first MAX_DIFFERING keys that differ, and the number of further keys.
    - `kept_graph`: whether an earlier run traced the graph; None if there was no graph.
    - `partition`: the sizes of a partitioned graph.
    - `artifact`: the precompiled step.
    - `placed`: the solved placements.
    - `throughput`: by system, the speed of its first run.
    - `layouts`: the bounds for two systems with different layouts of tensors.
    - `sums_over_ranks`: by built-in system of several ranks, how the ranks added, in words.
    - `checks`: each check's finding by the check's name.
    """

    verdict: Verdict
    error: str | None = None
    passes: list[PassReport] = field(default_factory=list)
    memory: dict[str, float | None] = field(default_factory=dict)
    differing: Differing = field(default_factory=dict)
    differing_left_out: Count = 0
    kept_graph: bool | None = None
    partition: Partition | None = None
    artifact: Artifact | None = None
    placed: Placed | None = None
    throughput: dict[Role, Throughput] = field(default_factory=dict)
    layouts: LayoutBounds | None = None
    sums_over_ranks: dict[Role, str] = field(default_factory=dict)
    checks: dict[str, Finding] = field(default_factory=dict)


@dataclass(kw_only=True)
class CaseResult(CaseFindings):
    """The result of a case.

    - `control`: by system, the verdict of comparing two of its runs; None if it ran once.
    - `stress`: as `control`, but the second run has random sleeps and other values in uninitialized memory.
    - `logs`: paths within the run folder.
    - `options`: the options of the run whose report had this case before a merge, unless they equal the report's.
    - `remarks`: sentences that qualify the evidence.
    - `collectives`: what transports data between ranks, "shared" for shared memory.
    - `backend`: the backend of torch's default group.
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
        """A text with the ranks, steps, device and backend of the case, and with how its ranks added."""
        meeting = ", shared memory" if self.collectives == "shared" else ""
        # If both systems added alike, this is said once, without naming them.
        agreed = {*map(self.sums_over_ranks.get, ROLES)}
        sides = {"": agreed.pop()} if len(agreed) == 1 else {f"{r}'s ": how for r, how in self.sums_over_ranks.items()}
        sums = [f"{side}sums over ranks {how}" for side, how in sides.items() if how]
        ran = f"{self.world_size} ranks, {self.steps} steps, {self.device}, {self.backend}{meeting}"
        return ", ".join([ran, *sums])

    @property
    def as_expected(self) -> bool:
        """Whether the case has its expected verdict and differences, and no check objects.

        Exactly the expected kinds must differ, within the case's bound. EQUAL also satisfies a case that expects CLOSE.
        """
        return self.agrees_as_expected and not any(self.objections())

    @property
    def agrees_as_expected(self) -> bool:
        """Whether the case got its expected verdict and differences. Ignores checks."""
        if self.case.expected == "CLOSE":
            return self.verdict in (Verdict.CLOSE, Verdict.EQUAL)
        # A larger difference than expected may be another defect.
        if self.is_beyond_bound:
            return False
        return self.verdict == self.case.expected and set(self.differing_kinds) == set(self.case.differs)

    @property
    def is_beyond_bound(self) -> bool:
        """Whether a difference is larger than the case allows: beyond `differs_within`, or of unknown size.

        False if the case states no such bound, or is not DIFFERENT.
        """
        bound, found = self.case.differs_within, self.closeness
        if bound is None or self.verdict != Verdict.DIFFERENT:
            return False
        # A size that was measured with another bound, or not at all, shows nothing.
        return found is None or found.bound != bound or not found.is_within

    def objections(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the reason of each check that objects or could not judge."""
        for name, found in self.checks.items():
            if reason := found.objection or found.unjudged:
                yield name, reason


@dataclass(frozen=True, kw_only=True)
class Event:
    """A notice of a case's progress.

    - `event`: the kind of notice. "prepare": a graph is being made. "prepared": the graph has been made. "start": the
      ranks start. "step": step number `step` of `steps` has ended. "compare": the recordings are compared.
    - `arm`: which run of `system` this is: "first", "control", "stress", "replay1" and so on.
    """

    event: Literal["prepare", "prepared", "start", "step", "compare"]
    case: str = ""
    system: str = ""
    arm: str = "first"
    step: int = 0
    steps: int = 0
