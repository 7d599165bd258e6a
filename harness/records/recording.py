"""A recording: a record per tensor of a system, and a manifest that states how the recording was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from bitproof.harness.case import Case, Kind
from bitproof.harness.errors import RecordingError
from bitproof.harness.validate import GROWING, read

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, ...] = ("reference", "candidate")
"""The roles of a case's two systems."""

REQUIRED_KINDS: tuple[Kind, ...] = ("loss", "grad", "param", "optimizer")
"""The kinds that every case must record at every step; see `required_kinds`."""


def needs_one_rank(kind: str, case: Case) -> bool:
    """Whether it is enough if a record of this kind is on a single rank per step.

    True only for losses of a pipeline or of a user's system, because some of their ranks may have no loss.
    """
    return kind == "loss" and (case.is_foreign or case.parallelism.pp > 1)


def required_kinds(case: Case) -> tuple[Kind, ...]:
    """Return the kinds that a case must record at each step: on each rank or, if `needs_one_rank`, on a single rank."""
    # Kinds that only some cases record.
    asked: tuple[tuple[Kind, bool], ...] = (("grad_norm", case.grad_norm), ("activation", bool(case.observe)))
    return (*REQUIRED_KINDS, *(kind for kind, is_asked in asked if is_asked))


CHANGED = "@changed"
"""The suffix of the names of records of an optimizer's settings and attributes. These are recorded only at a step that
changes them."""


OPTIMIZERS = "optimizers"
"""The entry of `Manifest.ranks` with the settings of a trainer's optimizers, as `systems.optimizer_settings` writes
it."""


class Key(NamedTuple):
    """The full name of a recorded tensor. Two records are paired only if all four parts are equal."""

    step: int
    kind: Kind
    name: str
    rank: int

    @property
    def is_changed_setting(self) -> bool:
        """Whether the record is of an optimizer's setting or attribute, at a step that changed it."""
        return self.kind == "optimizer" and self.name.endswith(CHANGED)


class Record(NamedTuple):
    """A tensor of a recording: its digest, and facts that describe a difference without the tensor's values.

    - `digest`: 32 hexadecimal digits over dtype, shape and all bytes.
    - `value`: a loss as a hexadecimal float, else None.
    - `content`: "nan" if all elements are NaN, "inf" if none is finite and some are infinite, "zero" if all are zero.
      Else None, as in older recordings.
    - `placements`: None for a plain tensor. A DTensor's record describes only the rank's part, and this field names the
      part, such as "Shard(dim=0) of [8, 4] over [2]".
    - `box`: the indices of this part, as the text of a `records.layout.Box`. None if unknown, or for a plain tensor.
    - `cells`: digests of pieces of the part, for a comparison with another layout, if requested.
    """

    digest: str
    dtype: str
    shape: tuple[int, ...]
    value: str | None = None
    content: str | None = None
    placements: str | None = None
    box: str | None = None
    cells: str | None = None


Switch = bool | int | str
"""The value of a switch of torch or of this process."""

MachineFacts = dict[str, str | int | list[str] | None]
"""Versions and hardware, by name."""


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """A pass that ran, and the settings that determine its effect, as JSON values."""

    __pydantic_config__ = GROWING

    name: str
    settings: Any = None


@dataclass(frozen=True, kw_only=True)
class GraphIdentity:
    """Identifies a graph's bits: the hash of its code, and the ordered passes.

    `generated_hash` is the hash of the code that a backend generated from the graph; None if it runs without a backend.
    """

    __pydantic_config__ = GROWING

    code_hash: str | None = None
    generated_hash: str | None = None
    passes: list[PassSettings] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TorchCompile:
    """The work of torch.compile on a rank's code, if any compiled code was called.

    - `frames`, `captured`: how many frames of Python code torch.compile tried to capture, and how many it captured.
    - `graphs`, `operators`: the number of captured graphs, and of the operator calls in them.
    - `backends`: the backends for which it captured graphs.
    - `breaks`: the number of graph breaks.
    - `recompiles`: the number of compiled frames whose guards failed later.
    - `first_break`, `first_recompile`, `first_failure`: the first line of torch's reason. A failure is a frame that it
      could not compile.
    """

    __pydantic_config__ = GROWING

    backends: list[str] = field(default_factory=list)
    frames: int = 0
    captured: int = 0
    graphs: int = 0
    operators: int = 0
    breaks: int = 0
    recompiles: int = 0
    first_break: str | None = None
    first_recompile: str | None = None
    first_failure: str | None = None

    @property
    def is_any(self) -> bool:
        return self.graphs > 0


@dataclass(frozen=True, kw_only=True)
class KeptCalls:
    """The logs of a step's operator calls that are stored with a baseline, as the sha256 of each rank's file."""

    __pydantic_config__ = GROWING

    step: int
    sha256: list[str]


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The reason why a baseline replaced another, the date in UTC (ISO 8601), and the commit."""

    __pydantic_config__ = GROWING

    why: str
    date: str
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A collective of a step, a scaling of a sum over ranks, or a count. `what` is its kind:

    - "sum": a collective that adds over ranks.
    - "exchange": a collective that sends rows from rank to rank.
    - "scale": a multiplication or division that rounds a sum over ranks, or its terms. Powers of two round nothing, and
      are left out.
    - "backward": the number of backward passes in a step.
    - "parts": the number of parts that are added up to a gradient.

    The other fields:

    - `phase`: "forward", "backward", "clip" (from backward to the first recorded gradient) or "update".
    - `ranks`: the ranks of the collective's group, such as "0,1".
    - `operator`: a collective's name, such as "allreduce_". For a scaling, the factor, and whether it is "before" or
      "after" the sum. A mean over 3 ranks is "after /1.5", since 3 = 2 * 1.5.
    - `backwards`: for "backward" and "parts", the number itself. Otherwise the number of backward passes with this
      operation.
    - `elements`: the size of a sum over more than two ranks, since it decides the order of the terms.
    """

    __pydantic_config__ = GROWING

    phase: str
    what: str
    ranks: str
    operator: str
    backwards: int = 1
    elements: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """How a recording was made: all facts that can change the bits of results, and a few others.

    Fields that may be None were added later, so None may also mean that the recording is older than the field.

    Run:

    - `case`: the case as written.
    - `stress`: the settings of a run with random sleeps, None for a plain run.
    - `values`: patterns of the tensors whose values are kept.
    - `collectives`: how the ranks exchange data. All sums are in rank order, except for "native", where NCCL chooses.

    Code and machine:

    - `sources`: the sha256 of bitproof's own files. `sources`, `machine`, `commit` and `environment` are the same on
      every rank.
    - `determinism`: torch's switches for determinism, as bitproof set them before the system was made.
    - `switches`: the values of all switches that can change bits, read at three times: before the system was made,
      after it was made, and after the last step. They are of the lowest rank whose system changed a switch, else of
      rank 0.

    Ranks:

    - `ranks`: for each rank, facts that the system reports, such as the sha256 of its data.
    - `chunked`: for each module, how many of its calls per step run in chunks, if the system chunks.
    - `alone`: the ranks that ran no collective with another rank, unless their system declares them independent.
    - `compiled`: the effect of torch.compile on each rank's code, None if nothing was to be compiled.
    - `unshown`: state of a user's system that a step changed but that is in no record; None if there is none.
    - `shows_every_buffer`: whether every buffer of the system's models has records.
    - `meetings`: the sums and exchanges over ranks, if requested.

    Files:

    - `calls`: the operator logs stored with a baseline.
    - `accepted`: why the baseline was accepted.
    - `digests_sha256`, `values_sha256`, `manifest_sha256`: the sha256 sums of the folder's files, set once these are
      written.
    """

    __pydantic_config__ = GROWING

    case: dict[str, Any]
    system: str
    world_size: int
    steps: int
    arm: str | None = None
    device: str | None = None
    backend: str | None = None
    collectives: str | None = None
    shared_gpus: bool | None = None
    machine: MachineFacts | None = None
    commit: str | None = None
    sources: str | None = None
    environment: dict[str, str] | None = None
    determinism: dict[str, Switch] | None = None
    switches: dict[str, dict[str, Switch]] | None = None
    graph: GraphIdentity | None = None
    fault: str | None = None
    ranks: list[dict[str, Any]] | None = None
    stress: dict[str, int | float] | None = None
    chunked: dict[str, int] | None = None
    alone: list[int] | None = None
    compiled: list[TorchCompile | None] | None = None
    unshown: list[str] | None = None
    shows_every_buffer: bool | None = None
    meetings: list[Meeting] | None = None
    digest: str | None = None
    values: list[str] = field(default_factory=list)
    digests_sha256: str | None = None
    values_sha256: list[str] | None = None
    calls: KeptCalls | None = None
    accepted: Accepted | None = None
    manifest_sha256: str | None = None

    @staticmethod
    def of(values: Any, where: str | None = None) -> Manifest:
        """Read a manifest from JSON values. Raises RecordingError, which names the field, for invalid values."""
        return read(Manifest, values, "manifest", RecordingError, damaged="is damaged", where=where)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Recording:
    """A system's run: a manifest of everything that can change a bit, and a record per key."""

    manifest: Manifest
    records: dict[Key, Record] = field(default_factory=dict)

    @property
    def holds_records(self) -> bool:
        """Whether all records are in memory. If so, readers use the records in memory instead of the file."""
        return True

    def first_steps(self, steps: int) -> Recording:
        """Return the recording that a run with fewer steps would have made."""
        # The case of a run with fewer steps would state that number, too.
        manifest = replace(self.manifest, steps=steps, case=self.manifest.case | {"steps": steps})
        return Recording(manifest, {key: record for key, record in self.records.items() if key.step < steps})

    def from_step(self, first: int) -> Recording:
        if not first:
            return self
        return Recording(self.manifest, {key: record for key, record in self.records.items() if key.step >= first})

    def with_manifest(self, manifest: Manifest) -> Recording:
        return Recording(manifest, self.records)

    @property
    def ranks(self) -> Sequence[int]:
        return sorted({key.rank for key in self.records})

    def records_of(self, rank: int) -> dict[Key, Record]:
        return {key: record for key, record in self.records.items() if key.rank == rank}

    def records_at(self, rank: int, step: int) -> dict[Key, Record]:
        return {key: record for key, record in self.records_of(rank).items() if key.step == step}

    def losses(self, rank: int | None = None) -> list[str]:
        """Return a rank's losses as hexadecimal floats, in step order.

        Without `rank`, return the losses of the first rank that has any: in a pipeline, only ranks of the last stage
        have losses.
        """
        for chosen in sorted(self.ranks) if rank is None else (rank,):
            if records := self.losses_of(chosen):
                # A key begins with its step, so the losses are in the order of the steps.
                return [records[key].value or "" for key in sorted(records)]
        return []

    def losses_of(self, rank: int) -> dict[Key, Record]:
        return {key: record for key, record in self.records_of(rank).items() if key.kind == "loss"}
