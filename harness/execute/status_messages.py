"""Messages that a rank sends to the host process during a run, and the host process's message about the run's end.
Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bitproof.harness.errors import RankError
from bitproof.harness.execute.failures import Failure, error_of_failure, error_of_hang
from bitproof.harness.operators.crossings import QueueEntry
from bitproof.harness.records import Artifact, MachineFacts, Meeting, PassReport, Switch, TorchCompile

if TYPE_CHECKING:
    from bitproof.harness.case import Case
    from bitproof.harness.systems.compiled import Capture
    from bitproof.harness.systems.graph_program import GraphProgram


@dataclass(frozen=True, kw_only=True)
class PreparedGraph:
    """Facts about a graph after all passes, for the manifest and the report.

    - `code_hash`: the hash of the graph's code. `generated_hash`: the hash of the code that a backend generated, if
      any.
    - `is_kept`: whether the graph was read from the cache, where an earlier run stored it.
    - `artifact`: facts about the precompiled step, if the graph was read from its folder.
    - `races`: descriptions of pairs of calls that use the same memory in no fixed order.
    - `calls`: the number of the graph's calls.
    - `calls_uncompared`: the number of calls whose values are in no record.
    """

    code_hash: str
    generated_hash: str | None = None
    passes: list[PassReport] = field(default_factory=list)
    trace_seconds: float = 0.0
    is_kept: bool = False
    artifact: Artifact | None = None
    races: list[str] = field(default_factory=list)
    calls: int = 0
    calls_uncompared: int = 0

    @property
    def was_kept(self) -> bool | None:
        """Whether an earlier run traced the graph; None if the graph was read from a precompiled step. The report
        states this.
        """
        return None if self.artifact else self.is_kept

    @property
    def compiled(self) -> list[str]:
        """Texts that say how much of the graph a backend compiled, such as "inductor compiled 3 regions, 120 nodes in
        all".

        A partitioned graph has a text for each half: "forward, ..." and "backward, ...".
        """
        facts = next((entry.facts for entry in self.passes if entry.name == "backend"), {})
        # A backend that compiled the halves of a partitioned graph has facts under each half's name.
        halves = {f"{half}, ": facts[half] for half in ("forward", "backward") if half in facts} or {"": facts}
        return [
            f"{half}{found['backend']} compiled {_describe_compiled(found)}"
            for half, found in halves.items()
            if "nodes_compiled" in found
        ]

    @staticmethod
    def of(program: GraphProgram | None, case: Case) -> PreparedGraph | None:
        """Return the facts about a rank's graph; None if its system runs no graph."""
        if program is None:
            return None
        from bitproof.harness.graph.analysis.uncompared import count_uncompared

        uncompared, calls = count_uncompared(program.module)
        return PreparedGraph(
            code_hash=program.code_hash,
            generated_hash=program.generated_hash,
            passes=program.passes,
            trace_seconds=program.trace_seconds,
            is_kept=program.is_kept,
            artifact=program.artifact,
            races=program.hazards(case),
            calls=calls,
            calls_uncompared=uncompared,
        )

    @staticmethod
    def captured(capture: Capture | None) -> PreparedGraph | None:
        """Return the facts about all graphs that torch.compile captured while steps ran; None if `capture` is None."""
        if capture is None:
            return None
        return PreparedGraph(
            code_hash=capture.code_hash,
            generated_hash=capture.generated_hash,
            passes=list(capture.reports.values()),
            races=list(dict.fromkeys(capture.races)),
            calls=capture.num_calls,
            calls_uncompared=capture.num_calls,  # the system itself decides which values it records
        )


def _describe_compiled(found: Mapping[str, Any]) -> str:
    nodes, regions = found["nodes_compiled"], found.get("regions_compiled")
    of_what = "the whole graph" if regions is None else f"{regions} regions"
    launches = found.get("launches")
    return f"{of_what}, {nodes:,} nodes in all" + (
        f", which launch {launches:,} kernels" if launches is not None else ""
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rank has the graph that it will run; `graph` is None if the system runs no graph."""

    graph: PreparedGraph | None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank has joined its process groups, and begins to make the system."""


@dataclass(frozen=True, kw_only=True)
class StepBegan:
    """A rank begins a step. Steps count from 0."""

    step: int


@dataclass(frozen=True, kw_only=True)
class StepsEnded:
    """A rank has finished its steps, and now writes its records."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A rank's report after it has ended successfully.

    Times:

    - `step_seconds`: each step's time without recording.
    - `flops`: the FLOPs of the first step; None if they were not counted.

    Memory, in MiB:

    - `peak_mib`: the peak on the rank's device; None on a CPU.
    - `process_mib`: the peak of the rank's process.

    Environment:

    - `determinism`: the determinism switches that were set.
    - `switches`: the switches that were read at the start, after the system was made, and after the steps.
    - `system`: the system's description of itself.
    - `gpu`: the versions of CUDA and its libraries. None on a CPU.
    - `gpu_environment`: the environment variables that CUDA's libraries read. Empty on a CPU.

    Checks:

    - `chunked`: the number of calls per step of each chunked module.
    - `unused_names`: rules for names in the system that matched no tensor.
    - `is_alone`: the rank ran no collective with another rank, and its system does not declare that ranks are
      independent.
    - `compiled`: the uses of torch.compile.
    - `races`: the races in the graph that a user's system shows.
    - `queue_entries`: the launches and waits of that graph's collectives, in order.
    - `unshown`: names of state that steps changed, and that is in no record.
    - `shows_every_buffer`: whether every buffer is in the records.
    - `meetings`: the sums over ranks, in a comparison of two layouts; else None.

    Replays:

    - `kept`: the digest of the record whose value the replay was requested to keep.
    - `narrow`: in a run in float64, the first call that read a value with fewer bits than float64 has.

    Graphs:

    - `graph`: facts about the graphs that torch.compile captured while steps ran.
    """

    seconds: float = 0.0
    record_seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()
    flops: int | None = None
    process_mib: float = 0.0
    peak_mib: float | None = None
    determinism: dict[str, Switch] = field(default_factory=dict)
    switches: dict[str, dict[str, Switch]] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    gpu: MachineFacts | None = None
    gpu_environment: dict[str, str] = field(default_factory=dict)
    chunked: dict[str, int] | None = None
    unused_names: tuple[str, ...] = ()
    kept: str | None = None
    is_alone: bool = False
    compiled: TorchCompile | None = None
    races: tuple[str, ...] = ()
    unshown: tuple[str, ...] = ()
    shows_every_buffer: bool = False
    queue_entries: tuple[QueueEntry, ...] = ()
    meetings: tuple[Meeting, ...] | None = None
    narrow: str | None = None
    graph: PreparedGraph | None = None


@dataclass(frozen=True, kw_only=True)
class RunSeconds:
    """The seconds that the parts of a run took."""

    prepare: float = 0.0
    start_ranks: float = 0.0
    steps: float = 0.0
    record: float = 0.0


Account = Prepared | Ready | StepBegan | StepsEnded | Done | Failure
"""A message from a rank's process to the process that forked it."""

STATUS_MESSAGES: tuple[type[Account], ...] = (Prepared, Ready, StepBegan, StepsEnded, Done, Failure)


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended on the ranks of one host process.

    After success:

    - `done`: each rank's last message, in rank order.
    - `graph`: facts about the graph of all ranks.

    After a failure:

    - `failure`: the failure of the rank to blame.
    - `place`: how far that rank was, as in "at step 3".
    - `log`: the path of that rank's log.

    After a hang:

    - `unfinished`: for each rank that did not finish, how far it was.
    - `stacks`: the stacks of these ranks.
    """

    done: list[Done] = field(default_factory=list)
    graph: PreparedGraph | None = None
    prepare_seconds: float = 0.0
    start_seconds: float = 0.0
    failure: Failure | None = None
    place: str = ""
    log: str = ""
    unfinished: dict[int, str] = field(default_factory=dict)
    stacks: str = ""

    def error(self, system: str, timeout: float) -> RankError | None:
        """Return the error that names the rank to blame; None after success. `timeout` is the case's time limit in
        seconds, which the error states.
        """
        if self.failure is not None:
            return error_of_failure(self.failure, system, self.place, self.log)
        return error_of_hang(system, timeout, self.unfinished, self.stacks) if self.unfinished else None
