"""A recording: a record per tensor that a system showed, and a manifest of everything that can change a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from bitproof.harness.case import Case, Kind
from bitproof.harness.errors import RecordingError
from bitproof.harness.validate import GROWING, read

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, ...] = ("reference", "candidate")
"""The two systems of a case, by what they are to each other."""

REQUIRED_KINDS: tuple[Kind, ...] = ("loss", "grad", "param", "optimizer")
"""What every rank must record at every step."""


def needs_one_rank(kind: str, case: Case) -> bool:
    """Whether at each step one rank is enough to record a kind: the last stage of a pipeline has the loss."""
    return kind == "loss" and (case.is_foreign or case.parallelism.pp > 1)


def required_kinds(case: Case) -> tuple[Kind, ...]:
    """What every rank must record at every step of a case, but for a kind that `needs_one_rank`."""
    asked: tuple[tuple[Kind, bool], ...] = (("grad_norm", case.grad_norm), ("activation", bool(case.observe)))
    return (*REQUIRED_KINDS, *(kind for kind, is_asked in asked if is_asked))


class Key(NamedTuple):
    """The full name of one recorded tensor. Records pair by all four parts or not at all."""

    step: int
    kind: Kind
    name: str
    rank: int


class Record(NamedTuple):
    """One tensor of a recording: its digest, and enough to say how it differs before values are read.

    `digest` is 32 hexadecimal digits over dtype, shape and every byte in order; `value` is the
    hexadecimal float of a loss, else None. `content` says of a tensor with elements that they are all NaN, "nan", that
    none is finite and some are infinite, "inf", or that all are zero, "zero", of either sign; else it is None, as in
    recordings from before it was recorded. Of a DTensor all of this is of the rank's own part, and `placements` says
    which part that is, such as "Shard(dim=0) of [8, 4] over [2]"; `box` is that part of the logical tensor, as
    `records.layout.Box` writes it, and None where nobody knows, or where the rank holds a plain tensor. `cells` has the
    digests of the part's cells, one after the other, of a run that was asked for them.
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
"""What a switch of torch's, or of this process, says of itself."""

MachineFacts = dict[str, str | int | list[str] | None]
"""Versions and hardware, by name."""


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """A pass that ran, and what decided what it did, as JSON values."""

    __pydantic_config__ = GROWING

    name: str
    settings: Any = None


@dataclass(frozen=True, kw_only=True)
class GraphIdentity:
    """What decides a graph's bits: the hash of its code, and the ordered passes.

    `generated_hash` is that of the code which a backend generated of it, None where the graph runs as it is.
    """

    __pydantic_config__ = GROWING

    code_hash: str | None = None
    generated_hash: str | None = None
    passes: list[PassSettings] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TorchCompile:
    """What torch.compile made of the code that it was given on one rank, where any of that was called.

    It met `frames` of Python code and `captured` so many, as `graphs` with `operators` calls in all, for `backends`.
    `breaks` is the number of graph breaks, `recompiles` that of frames that were compiled before and did not fit again.
    The first of each, and the first frame that it could not take, are told by the first line of torch's reason.
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
        """Whether anything was compiled."""
        return self.graphs > 0


@dataclass(frozen=True, kw_only=True)
class KeptCalls:
    """The logs of one step's operator calls that lie beside a baseline: the sha256 of each rank's file."""

    __pydantic_config__ = GROWING

    step: int
    sha256: list[str]


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Why a baseline took another's place, at which commit, and when, as a date of ISO 8601 in UTC."""

    __pydantic_config__ = GROWING

    why: str
    date: str
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A collective that adds over ranks, "sum", or hands rows from rank to rank, "exchange", and where in a step.

    `phase` is "forward", "backward", "clip" (from backward to the first gradient that is shown) or "update"; `ranks`
    are those of the group, as in "0,1"; `operator` is what ran it, as in "allreduce_", in `backwards` of each step. One
    whose `what` is "backward" is none, and only counts those.
    """

    __pydantic_config__ = GROWING

    phase: str
    what: str
    ranks: str
    operator: str
    backwards: int = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a recording says of how it was made: everything that can change a bit.

    `case` is as its case was written. `ranks` holds, rank by rank, what each system says of itself (its data's
    sha256); `stress` what the run was disturbed by, None for a plain one; `chunked`, of a system that chunks, how often
    a step runs each module in chunks; `values` the patterns of the tensors whose values are kept, which change no bit.
    `collectives` is where ranks met, which changes no bit, as sums are in rank order everywhere but where it is
    "native": there NCCL has an order of its own.
    `alone` are the ranks that ran no collective with another in any step, though their system does not say that they
    are independent; `compiled` has what torch.compile made of each rank's code, None where none was to be compiled.
    `unshown` names state of a user's system that steps have changed and no record has.
    `meetings` are the sums and exchanges over ranks that any rank took part in, of a run that was asked for them.
    `sources` is the sha256 of bitproof's own files, which with machine, commit and environment is that of every rank.
    `determinism` is what was set before the system was made, `switches` what was read then, when it was made and after
    the last step. `calls` are the logs that a baseline has beside it, and `accepted` says why it was accepted: neither
    is of how the recording was made. The sums are of the folder's files, and known once they are written. Fields that
    may be None came later than the first recordings.
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
        """The manifest that JSON values state. Raises RecordingError, naming the field, for what is none."""
        return read(Manifest, values, "manifest", RecordingError, damaged="is damaged", where=where)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass
class Recording:
    """What one system did: a manifest of everything that can change a bit, and a record per key."""

    manifest: Manifest
    records: dict[Key, Record] = field(default_factory=dict)

    def first_steps(self, steps: int) -> Recording:
        """The recording that a run of fewer steps would have made."""
        manifest = replace(self.manifest, steps=steps, case=self.manifest.case | {"steps": steps})
        return Recording(manifest, {key: record for key, record in self.records.items() if key.step < steps})

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that recorded anything, in ascending order."""
        return sorted({key.rank for key in self.records})

    def records_of(self, rank: int) -> dict[Key, Record]:
        """One rank's records."""
        return {key: record for key, record in self.records.items() if key.rank == rank}

    def losses(self, rank: int | None = None) -> list[str]:
        """One rank's losses as hexadecimal floats, in step order: by default the first rank's that has some, which in
        a pipeline is one of its last stage.
        """
        chosen = min((key.rank for key in self.records if key.kind == "loss"), default=0) if rank is None else rank
        records = self.records_of(chosen)
        return [records[key].value or "" for key in sorted(key for key in records if key.kind == "loss")]
