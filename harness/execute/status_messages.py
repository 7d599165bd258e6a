"""Messages that a rank's process sends to its host during a run, and the message about a run's end. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bitproof.harness.errors import RankError
from bitproof.harness.execute.failures import Failure, error_of_failure, error_of_hang
from bitproof.harness.operators.crossings import RankTurn
from bitproof.harness.records import Artifact, MachineFacts, Meeting, PassReport, Switch, TorchCompile

if TYPE_CHECKING:
    from bitproof.harness.case import Case
    from bitproof.harness.systems.compiled import Capture
    from bitproof.harness.systems.graph import GraphProgram


@dataclass(frozen=True, kw_only=True)
class PreparedGraph:
    """Facts for the manifest and the report about a graph that passes have transformed, and a backend's generated code.

    `is_kept`: an earlier run traced the graph. `artifact` is the precompiled step, if the graph was read from a folder.
    `races` are pairs of calls that use the same memory without an order. `calls` is the number of the graph's calls;
    `calls_uncompared` is the number of calls whose values no record contains.
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
        """`is_kept` as the report has it: None if the graph was read from a precompiled step."""
        return None if self.artifact else self.is_kept

    @property
    def compiled(self) -> list[str]:
        """How much of the graph a backend compiled, such as "inductor compiled 3 regions, 120 nodes in all".

        There is a text for the graph or, if it is partitioned, for each half: "forward, ..." and "backward, ...".
        """
        facts = next((entry.facts for entry in self.passes if entry.name == "backend"), {})
        halves = {f"{half}, ": facts[half] for half in ("forward", "backward") if half in facts} or {"": facts}
        return [
            f"{half}{found['backend']} compiled {_tell_compiled(found)}"
            for half, found in halves.items()
            if "nodes_compiled" in found
        ]

    @staticmethod
    def of(program: GraphProgram | None, case: Case) -> PreparedGraph | None:
        """The facts about a rank's graph; None if its system runs no graph."""
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
        """The facts about graphs that torch.compile captured while steps ran; None if no graph was captured."""
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


def _tell_compiled(found: Mapping[str, Any]) -> str:
    nodes, regions = found["nodes_compiled"], found.get("regions_compiled")
    of_what = "the whole graph" if regions is None else f"{regions} regions"
    launches = found.get("launches")
    return f"{of_what}, {nodes:,} nodes in all" + (
        f", which launch {launches:,} kernels" if launches is not None else ""
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rank has its graph; `graph` is None if the system runs none."""

    graph: PreparedGraph | None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank has joined its process groups."""


@dataclass(frozen=True, kw_only=True)
class StepBegan:
    """A rank begins a step. Steps count from 0."""

    step: int


@dataclass(frozen=True, kw_only=True)
class StepsEnded:
    """A rank has finished its steps, and now writes its records."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A rank's report of a successful end.

    - Times: `step_seconds` has each step's time without recording; `flops` are the FLOPs of the first step, if they
      were counted.
    - Memory: `peak_mib` is the peak on the rank's device, None on a CPU; `process_mib` is the peak of its process.
    - Environment: `determinism` has the determinism switches that were set; `switches` has the switches that were read
      at the start, after the system was made, and after the steps. `system` is the system's description of itself;
      `gpu` has the versions of CUDA and its libraries, and `gpu_environment` the environment variables that these
      libraries read. Both are empty on a CPU.
    - Checks: `chunked` counts the calls per step of each chunked module; `unused_names` are declared names that never
      appeared; `is_alone`: the rank ran no collective with another rank, and its system does not declare that ranks are
      independent; `compiled` describes the use of torch.compile; `races` are those of the graph that a user's system
      shows; `turns` are the launches and waits of that graph's collectives, in order; `unshown` is state that steps
      changed and no record contains; `shows_every_buffer` and `meetings` (sums over ranks) are copied into the
      manifest.
    - Replays: `kept` is the digest of the record that a replay had to keep; `narrow` is the first call that read fewer
      bits than float64 has, in a run in float64.
    - Graphs: `graph` describes graphs that were captured while steps ran, if the system does that.
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
    turns: tuple[RankTurn, ...] = ()
    meetings: tuple[Meeting, ...] | None = None
    narrow: str | None = None
    graph: PreparedGraph | None = None


@dataclass(frozen=True, kw_only=True)
class RunSeconds:
    """The seconds of a run's parts."""

    prepare: float = 0.0
    start_ranks: float = 0.0
    steps: float = 0.0
    record: float = 0.0


Account = Prepared | Ready | StepBegan | StepsEnded | Done | Failure
"""A message from a rank's process to its host."""

STATUS_MESSAGES: tuple[type[Account], ...] = (Prepared, Ready, StepBegan, StepsEnded, Done, Failure)


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a run on the ranks of one host.

    After success, `done` has each rank's last message, in rank order, and `graph` describes the graph of all ranks.
    After a failure, `failure` is that of the rank to blame, with the rank's `place` and `log`. After a hang,
    `unfinished` maps each late rank to its place in words, such as "at step 3", and `stacks` has stacks of such ranks.
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
        """The error that names the rank to blame; None after success. `timeout` is the case's limit in seconds."""
        if self.failure is not None:
            return error_of_failure(self.failure, system, self.place, self.log)
        return error_of_hang(system, timeout, self.unfinished, self.stacks) if self.unfinished else None
