"""Requests to a host, a frozen dataclass each, and their answers. Imports no torch.

A request's class names the class of its answer. `harness.execute.host.answerer` answers every class of request, and
`harness.processes.framing` converts requests and answers to lines of JSON.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

from bitproof.harness.capture.selection import ALL
from bitproof.harness.case import Case, Plan
from bitproof.harness.compare.bits import ComparedBits
from bitproof.harness.execute.status_messages import End, PreparedGraph, RunSeconds
from bitproof.harness.execute.two_halves import Resume, first_half
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.localize.logs.replay import LoggedStep, Replay
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Artifact, Closeness, Placed, Throughput
from bitproof.harness.records.layout import Across
from bitproof.harness.systems.graph_key import traced_part

if TYPE_CHECKING:
    from bitproof.harness.disturb.kinds import Fault

A = TypeVar("A")

VALUES, ARCHIVE = ".safetensors", ".zip"
"""Suffixes of a rank's extra files beside its records: its values, and the archive of a step's calls."""


class Request(Generic[A]):
    """A request whose answer has the class `answer`, the type A.

    `subject` describes the request in errors. Names in braces in it are replaced by fields: `precompiling {case.name}`.
    """

    answer: ClassVar[type[Any]]
    subject: ClassVar[str] = "the host"

    @property
    def about(self) -> str:
        """The subject, with the values of its fields: "precompiling moe_tiny"."""
        return self.subject.format_map(vars(self))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about this machine that decide the placement of a case: the number of GPUs that torch can use."""

    gpus: int


@dataclass(frozen=True)
class MachineRequest(Request[Machine]):
    """Count the GPUs that torch can use."""

    answer = Machine


@dataclass(frozen=True, kw_only=True)
class MadeOf:
    """The software of this machine's ranks: versions and hashes of code by name (`harness.capture.made_of`); visible
    GPUs.
    """

    facts: dict[str, str]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class MadeOfRequest(Request[MadeOf]):
    """Report the versions and code of the host, and so of every rank that it forks.

    With `names_gpus`, also name the GPUs that the host sees.
    """

    answer = MadeOf

    names_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """The facts about a successful run.

    - `graph`: facts about the graph that the ranks ran, if any.
    - `peak_mib`: the largest peak of device memory on a rank; None on a CPU.
    - `kept`: the digest of the record that a replay had to keep.
    - `switches_changed`: torch's determinism switches that the system changed.
    - `races`: unordered uses of the same memory in the system's graphs.
    - `narrow`: in a run in float64, the first call that read a value with fewer bits than float64 has.
    """

    graph: PreparedGraph | None = None
    peak_mib: float | None = None
    kept: str | None = None
    switches_changed: tuple[str, ...] = ()
    races: tuple[str, ...] = ()
    narrow: str | None = None
    seconds: RunSeconds = field(default_factory=RunSeconds)
    throughput: Throughput | None = None


@dataclass(frozen=True)
class StepFolder:
    """The folder of a precompiled step; `trust_compiled` permits its compiled code to run."""

    path: Path
    trust_compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request[RunAnswer]):
    """Run a system. Paths are of this machine.

    - `arm`: the purpose of the run, such as `first` or `control`; see `CaseRun`.
    - `out`: the folder of the recording, or of a replay's archives.
    - `options`: the command's options, as far as this run follows them.
    - `timeout`: the rest of `case_timeout`, in seconds.
    - `later`: the next request. Its program may be made while the ranks of this run take their steps.
    - `profile`, `dump_dir`: folders for profiles and graphs.
    - `precompiled`: the step to read; then nothing is traced.
    - `watch`: also log a step's calls, in a run that is no replay.
    - `across`: the settings of a run for a case with two layouts.
    - `resume`: kill the run half-way, and resume it.
    """

    answer = RunAnswer
    subject = "{system}"

    case: Case
    system: str
    arm: str
    placement: Placement
    out: Path
    logs: Path
    work: Path
    timeout: float
    case_timeout: float
    options: RunOptions = field(default_factory=RunOptions)
    replay: Replay | None = None
    watch: LoggedStep | None = None
    across: Across | None = None
    resume: Resume | None = None
    later: RunRequest | None = None
    profile: Path | None = None
    dump_dir: Path | None = None
    precompiled: StepFolder | None = None

    @property
    def values_to_keep(self) -> tuple[str, ...]:
        """Patterns for the names of tensors whose values ranks keep.

        If the case states a bound, a first run keeps all.
        """
        if self.across is not None:
            return ALL if self.across.keeps_values else ()
        if not self.is_first:
            return ()
        return ALL if self.case.bound is not None else self.options.values

    @property
    def halves(self) -> tuple[RunRequest, ...]:
        """The runs to make, in order: this one; or two, if the run is killed half-way and resumed.

        A replay of a step before the resume needs only the first of the two.
        """
        resume, replay = self.resume, self.replay
        if resume is None or resume.goes_on:
            return (self,)
        if replay is not None and replay.step < resume.at:
            return (dataclasses.replace(self, resume=None),)
        case, system = first_half(self.case, self.system)
        # The step to log is in the second half: a replay of an earlier step ends before the resume.
        first = dataclasses.replace(self, case=case, system=system, replay=None, watch=None)
        return first, dataclasses.replace(self, resume=dataclasses.replace(resume, goes_on=True))

    @property
    def is_first(self) -> bool:
        """Whether this is a first run, neither a control nor a replay."""
        return self.arm == "first" and self.replay is None

    @property
    def fault(self) -> Fault | None:
        """The deliberate defect of this run. Raises UsageError for an unknown fault."""
        if not self.options.inject:
            return None
        from bitproof.harness.disturb.faults import parse_fault

        return parse_fault(self.options.inject)

    @property
    def graph_options(self) -> GraphOptions:
        """The settings of the graph pipeline that are not part of the case."""
        return GraphOptions(extra_passes=self.options.extra_passes, dump_dir=self.dump_dir)

    @property
    def program(self) -> str:
        """The settings that decide the graph which the ranks run, as a text. Requests with equal texts may share a
        graph.
        """
        of_step = traced_part(self.case).to_dict(), self.system, self.options.extra_passes
        return json.dumps([*of_step, str(self.precompiled or "")], sort_keys=True)

    @property
    def runs_user_code(self) -> bool:
        """Whether a user's pass takes part in making the graph."""
        return bool(self.options.extra_passes)

    @property
    def trace_log(self) -> Path:
        """The log of tracing and of the passes."""
        return self.logs / f"trace{self._suffix}.log"

    def log_of(self, rank: int) -> Path:
        """The path of a rank's log. The names of second runs' logs have a suffix."""
        return self.logs / f"rank{rank}{self._suffix}.log"

    @property
    def _suffix(self) -> str:
        return "" if self.arm == "first" else f".{self.arm}"


@dataclass(frozen=True, kw_only=True)
class RankSlots:
    """The ranks of a run that a host starts, the store in which ranks find each other, and files for their records.

    `part` is the template of a record file's path, with `{rank}`. Without `server`, `store` is the path of a file. With
    `server`, the host and port of an existing store, `store` is a prefix of the keys in it. In that case a launcher
    such as torchrun started the rank: `local_rank` and `local_world_size` are as in torchrun, and `gpu` is the index of
    the rank's GPU.
    """

    ranks: tuple[int, ...]
    part: str
    store: str
    server: tuple[str, int] | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, kw_only=True)
class LocalRunRequest(Request[End]):
    """Run the ranks of `rank_slots` here. Other hosts may run the other ranks; the client joins all records.

    With `is_prefetch`, a stage (a forked process, `host/stage.py`) only makes the run's graph, and sends no answer: a
    later request for the run reports errors. `asked_at` is the time of the request on this machine's monotonic clock. A
    stage may be busy at that time; waiting for it counts as time of the run.
    """

    answer = End
    subject = "{run.system}"

    run: RunRequest
    rank_slots: RankSlots
    is_prefetch: bool = False
    asked_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class BitsRequest(Request[ComparedBits]):
    """Compare two values bit by bit: those that both systems' archives have under `name`."""

    answer = ComparedBits
    reference: Path
    candidate: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class ClosenessRequest(Request[Closeness]):
    """Measure how close the values of two recordings are, in one step or in all steps (`step` is None)."""

    answer = Closeness
    reference: Path
    candidate: Path
    bound: float
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class CallAnswer:
    """The result of a power's function, in JSON's types."""

    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CallRequest(Request[CallAnswer]):
    """Call a power's function, "MODULE:FUNCTION", with the case and `values`, in JSON's types.

    It is imported only in the process that is forked to answer. For example, `shrink` has its standalone files
    written this way, so no other command loads what writes them.
    """

    answer = CallAnswer

    case: Case
    function: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrecompileAnswer:
    """The artifact, and the seconds for tracing as the first and as the last rank, for passes, and for writing."""

    artifact: Artifact
    trace_seconds: tuple[float, float]
    pass_seconds: float
    write_seconds: float


@dataclass(frozen=True, kw_only=True)
class PrecompileRequest(Request[PrecompileAnswer]):
    """Make the step of a case's system and write it into a folder. With the fault `inject`, only compare two ranks'
    steps.
    """

    answer = PrecompileAnswer
    subject = "precompiling {case.name}"

    case: Case
    system: str
    out: Path
    device: str = "cpu"
    inject: str | None = None
    timeout: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class StepAnswer:
    """The precompiled step, which a run may read."""

    artifact: Artifact


@dataclass(frozen=True, kw_only=True)
class StepRequest(Request[StepAnswer]):
    """Check a precompiled step, by reading it as a run of the case's system would. Raises the errors of reading."""

    answer = StepAnswer
    subject = "the precompiled step for {case.name}"

    case: Case
    system: str
    step: StepFolder
    device: str = "cpu"
    timeout: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class PlaceAnswer:
    """The plan of a case's placements, and the report's facts about it."""

    plan: Plan
    placed: Placed


@dataclass(frozen=True, kw_only=True)
class PlaceRequest(Request[PlaceAnswer]):
    """Solve for a case's placements (which tensor is sharded how) within `timeout` seconds. Output goes to `logs`."""

    answer = PlaceAnswer
    subject = "autoplace"

    case: Case
    logs: Path
    timeout: float


AnyRequest = (
    MachineRequest
    | MadeOfRequest
    | RunRequest
    | LocalRunRequest
    | BitsRequest
    | ClosenessRequest
    | CallRequest
    | PrecompileRequest
    | StepRequest
    | PlaceRequest
)

REQUESTS: tuple[type[AnyRequest], ...] = get_args(AnyRequest)
"""Every class of request that a host answers."""
