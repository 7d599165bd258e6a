"""The requests to a host process and their answers, all frozen dataclasses. Imports no torch.

A request's attribute `answer` is the class of its answer. `harness.execute.host.answerer` answers them, and
`harness.processes.framing` converts them to lines of JSON.
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
from bitproof.harness.execute.save_and_resume import Resume, first_half
from bitproof.harness.execute.status_messages import End, PreparedGraph, RunSeconds
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
"""Suffixes of a rank's extra files beside its records: its tensor values, and the log of a step's calls."""


class Request(Generic[A]):
    """A request to a host process. Its answer is an instance of the class `answer`, which is the type A.

    `subject` describes the request in errors. It may contain fields of the request: "precompiling {case.name}".
    """

    answer: ClassVar[type[Any]]
    subject: ClassVar[str] = "the host"

    @property
    def about(self) -> str:
        """The subject with the values of the request's fields, such as "precompiling moe_tiny"."""
        return self.subject.format_map(vars(self))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The number of GPUs on a machine that torch can use, which decides on which devices a case can run."""

    gpus: int


@dataclass(frozen=True)
class MachineRequest(Request[Machine]):
    """Count the GPUs that torch can use."""

    answer = Machine


@dataclass(frozen=True, kw_only=True)
class RankFingerprint:
    """The software and GPUs that ranks on this machine use.

    `facts` maps the names of packages to versions and hashes of code (`harness.capture.rank_fingerprint`). `gpus` has
    the names of the GPUs; it is empty if the request did not require them.
    """

    facts: dict[str, str]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class FingerprintRequest(Request[RankFingerprint]):
    """Report the versions and code of the host process. All ranks that it forks have the same.

    With `names_gpus`, the answer also has the names of the GPUs that torch can use.
    """

    answer = RankFingerprint

    names_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """The facts about a successful run.

    - `graph`: facts about the graph that the ranks ran, if any.
    - `peak_mib`: the largest peak of device memory on any rank, in MiB; None on a CPU.
    - `kept`: in a replay, the digest of the record whose value the replay was requested to keep.
    - `switches_changed`: descriptions of torch's determinism switches that the system changed.
    - `races`: descriptions of races in the system's graphs, that is, of uses of the same memory in no fixed order.
    - `narrow`: in a run in float64, the first operator call that read a value in a narrower dtype.
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
    """The folder of a precompiled step. `trust_compiled`: whether its compiled code may run."""

    path: Path
    trust_compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request[RunAnswer]):
    """Run a system once. All paths are on this machine.

    - `arm`: the purpose of the run, such as `first` or `control`; see `CaseRun`.
    - `out`: the folder for the recording or, in a replay, for the logged calls and values.
    - `options`: the command's options that apply to this run.
    - `case_timeout`, `timeout`: the time limit of the whole case, and how much of it remains, in seconds.
    - `replay`: if given, the run repeats an earlier run up to a step, and logs or stores more than that run did.
    - `watch`: for a run that records: the step whose calls it also logs, and the folder for these logs.
    - `later`: the run that will be requested after this run. Its graph may be made while the ranks take the steps of
      this run.
    - `profile`, `dump_dir`: folders for profiles and graphs.
    - `precompiled`: the folder of a compiled step. If it is given, the ranks load this step and trace nothing.
    - `across`: the settings of a run for comparing two layouts.
    - `resume`: kill the run half-way, and resume it from its saved state.
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
        """Patterns for the names of tensors whose values are written to files, in addition to digests of all tensors.

        The option `values` has them for a system's "first" run. If the case states a bound, that run keeps all values.
        """
        if self.across is not None:
            return ALL if self.across.keeps_values else ()
        if not self.is_first:
            return ()
        return ALL if self.case.bound is not None else self.options.values

    @property
    def halves(self) -> tuple[RunRequest, ...]:
        """The requests that together make up this run, in order.

        A run that is killed half-way and resumed has two: for the steps before the kill, and for those after it. For
        any other run, the only request is this object. A replay of a step before the kill needs only the first half.
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
        return self.arm == "first" and self.replay is None

    @property
    def fault(self) -> Fault | None:
        """The deliberate fault of this run; None if there is none. Raises UsageError for an unknown fault."""
        if not self.options.inject:
            return None
        from bitproof.harness.disturb.faults import parse_fault

        return parse_fault(self.options.inject)

    @property
    def graph_options(self) -> GraphOptions:
        return GraphOptions(extra_passes=self.options.extra_passes, dump_dir=self.dump_dir)

    @property
    def program(self) -> str:
        """A text with all settings that determine which graph the ranks run. Requests with equal texts may share a
        graph.
        """
        of_step = traced_part(self.case).to_dict(), self.system, self.options.extra_passes
        return json.dumps([*of_step, str(self.precompiled or "")], sort_keys=True)

    @property
    def runs_user_code(self) -> bool:
        return bool(self.options.extra_passes)

    @property
    def trace_log(self) -> Path:
        return self.logs / f"trace{self._suffix}.log"

    def log_of(self, rank: int) -> Path:
        """Return the path of a rank's log. The name contains the run's `arm`, as in `rank1.control.log`, unless that is
        "first".
        """
        return self.logs / f"rank{rank}{self._suffix}.log"

    @property
    def _suffix(self) -> str:
        return "" if self.arm == "first" else f".{self.arm}"


@dataclass(frozen=True, kw_only=True)
class RankSlots:
    """The ranks that a host process starts for a run, and the paths of their files.

    - `part`: the path of a rank's file of records, in which `{rank}` stands for the rank.
    - `store`: the file of torch's FileStore, through which the ranks find each other. But if `server` is given, `store`
      is a prefix for keys in the launcher's store.
    - `server`: the host name and port of the store of a launcher, such as torchrun. None if the host process forks all
      ranks.
    - `gpu`: the index of the rank's GPU, under a launcher.
    - `local_rank`, `local_world_size`: as in torchrun, under a launcher.
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
    """Run the ranks of `rank_slots` in this host process. Other host processes may run the other ranks.

    - `is_prefetch`: only make the run's graph, and send no answer. If this fails, the later request for the run raises
      the error.
    - `asked_at`: the time of the request, by `time.monotonic()`. The run's time limit counts from here.
    """

    answer = End
    subject = "{run.system}"

    run: RunRequest
    rank_slots: RankSlots
    is_prefetch: bool = False
    asked_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class BitsRequest(Request[ComparedBits]):
    """Compare two values bit by bit. They have the name `name` in the files `reference` and `candidate`, which a replay
    wrote.
    """

    answer = ComparedBits
    reference: Path
    candidate: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class ClosenessRequest(Request[Closeness]):
    """Measure how close the values of two recordings are, in step `step` (None: in all steps)."""

    answer = Closeness
    reference: Path
    candidate: Path
    bound: float
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class CallAnswer:
    """The result of the function that a CallRequest called: `values` has only JSON's types."""

    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CallRequest(Request[CallAnswer]):
    """Call a function of `harness/powers` with the case and the keyword arguments `values`, which have only JSON's
    types.

    `function` is "MODULE:FUNCTION". The module is imported only in the process that is forked to answer this request.
    """

    answer = CallAnswer

    case: Case
    function: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrecompileAnswer:
    """Facts about the precompiled step (`artifact`), and the seconds that it took to make the step.

    `trace_seconds` has two times: for tracing the step of the first rank, and for tracing the step of the last rank.
    """

    artifact: Artifact
    trace_seconds: tuple[float, float]
    pass_seconds: float
    write_seconds: float


@dataclass(frozen=True, kw_only=True)
class PrecompileRequest(Request[PrecompileAnswer]):
    """Make the step of a case's system and write it into the folder `out`.

    If `inject` names a deliberate fault, nothing is written. Instead, the steps of two ranks are compared; this
    comparison must find the fault.
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
    """Facts about a precompiled step that was checked: a run can read it."""

    artifact: Artifact


@dataclass(frozen=True, kw_only=True)
class StepRequest(Request[StepAnswer]):
    """Check a precompiled step by reading it as a run of the case's system would. Raises the errors of such a run."""

    answer = StepAnswer
    subject = "the precompiled step for {case.name}"

    case: Case
    system: str
    step: StepFolder
    device: str = "cpu"
    timeout: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class PlaceAnswer:
    """A plan for sharding a case's tensors, and facts about the plan for the report."""

    plan: Plan
    placed: Placed


@dataclass(frozen=True, kw_only=True)
class PlaceRequest(Request[PlaceAnswer]):
    """Find the best plan for sharding a case's tensors, within `timeout` seconds.

    The solver's output goes to the folder `logs`.
    """

    answer = PlaceAnswer
    subject = "autoplace"

    case: Case
    logs: Path
    timeout: float


AnyRequest = (
    MachineRequest
    | FingerprintRequest
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
"""Every class of request that a host process answers."""
