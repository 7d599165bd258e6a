"""One rank's run of one system: join the groups, build the system, take the steps, record, leave.

Runs in a forked rank, or in a process that torchrun started; neither knows which.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.capture.recorder import Recorder
from harness.capture.store import write_part
from harness.capture.values import write_values
from harness.case import Case, Kind
from harness.determinism import set_determinism
from harness.devices import Placement
from harness.faults import Fault, Injector
from harness.graph.options import GraphOptions
from harness.localize.replay import OUTPUT, RECORD, Remains, Replay, write_archive
from harness.stress import Stress, stressed
from harness.systems import BUILT_IN, load_factory

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from reference.parallel.mesh import Mesh

    Observe = Callable[[Kind, str, torch.Tensor], None]

Report = Callable[[dict[str, Any]], None]
logger = logging.getLogger("harness")


class System(Protocol):
    """Something that can take training steps and show what each computed."""

    def step(self, index: int, observe: Observe) -> None:
        """Take one step; call `observe` for each loss, gradient, buffer, parameter and optimizer state as computed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of one run is to do. `part` is the file that a rank records into, `{rank}` left open.

    With `replay`, the run ends with that step, and the file is what a replay leaves behind; with `values`, ranks
    write the values of tensors that fit these patterns. `names`, unless empty, stands for those that the system
    declares. `program` is the prepared graph when the host could make it before forking, else each rank makes it
    by `graph_options`. `local_rank`, where it is not the rank, chooses the GPU.
    Times are in seconds: `timeout` is what is left of `case_timeout`, the time that the case has in all;
    `collective_timeout` is longer where somebody watches the ranks, who can say more about a hang than a collective.
    """

    case: Case
    system: str
    placement: Placement
    part: str
    timeout: float
    case_timeout: float
    collective_timeout: float
    fault: Fault | None = None
    replay: Replay | None = None
    program: Any = None
    graph_options: GraphOptions = field(default_factory=GraphOptions)
    local_rank: int | None = None
    stress: Stress | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps the run takes."""
        return self.case.steps if self.replay is None else self.replay.step + 1

    def part_of(self, rank: int) -> Path:
        """The file that a rank records into."""
        return Path(self.part.format(rank=rank))

    def values_of(self, rank: int) -> Path:
        """The file that a rank writes its values into, when it keeps them."""
        return self.part_of(rank).with_suffix(".safetensors")


def run_rank(job: Job, rank: int, store: Store, report: Report) -> None:
    """Run one rank to its end. Events go to `report`: prepared, ready, step, end, done.

    Whatever goes wrong is raised; process groups then stay as they are, for the caller to leave or to die with.
    """
    import torch
    import torch.distributed as dist

    from harness.capture.digest import digest
    from harness.user_system import UserSystem
    from reference.parallel.mesh import Mesh, join_groups, leave_groups

    determinism = set_determinism(
        job.case.seed,
        fill_uninitialized=job.stress is None,
        num_threads=job.stress.num_threads if job.stress else 1,
    )
    device = torch.device(job.placement.device_of(rank if job.local_rank is None else job.local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.placement.shared and job.placement.backend == "nccl":
        os.environ["NCCL_HOSTID"] = f"bitproof-rank{rank}"  # NCCL refuses two ranks of one host on one GPU
    program = job.program
    if program is None and needs_program(job.system):
        program = prepare_program(job.case, device, options_of_rank(job.graph_options, rank))
    report({"event": "prepared", "graph": describe_program(program)})
    mesh = Mesh(rank=rank, parallelism=job.case.parallelism, device=device)
    join_groups(mesh, device, store, backend=job.placement.backend, timeout=job.collective_timeout)
    report({"event": "ready"})

    injector = Injector(job.fault, rank)
    recorder = Recorder(rank, job.replay.record if job.replay else None, job.values)
    remains = Remains()
    with stressed(job.stress, rank):
        system = make_system(job, mesh, program, injector)
        _forget_peak(device)
        began = time.perf_counter()
        for step in range(job.steps):
            report({"event": "step", "step": step})
            recorder.step = step
            injector.begin_step(step)
            if job.replay and job.replay.watches(step):
                _replay_step(job.replay, step, system, recorder, remains)
            else:
                system.step(step, recorder.observe)
        injector.check_fired()
        seconds = time.perf_counter() - began
    report({"event": "end"})
    if job.replay is None:
        write_part(job.part_of(rank), recorder.rows.items())
    else:
        remains.records = recorder.rows
        if recorder.kept is not None:
            remains.values[RECORD] = recorder.kept
        write_archive(job.part_of(rank), remains)
    if job.values:
        write_values(job.values_of(rank), recorder.values)
    dist.barrier()  # a rank that left early would look to the others like one that died
    logger.debug("%d steps in %.3f s, of which recording %.3f s", job.steps, seconds, recorder.seconds)
    report(
        {
            "event": "done",
            "seconds": seconds,
            "record_seconds": recorder.seconds,
            "peak_mib": _peak_mib(device),
            "determinism": determinism,
            "system": _describe_system(system),
            "unused_names": list(system.names.unused) if isinstance(system, UserSystem) else [],
            "kept": digest(recorder.kept) if recorder.kept is not None else None,
        }
    )
    leave_groups()


def _replay_step(replay: Replay, step: int, system: System, recorder: Recorder, remains: Remains) -> None:
    """Take a step of a replay that is watched, and keep what the replay asks for."""
    from torch.utils._python_dispatch import _disable_current_modes

    from harness.localize.recorder import logged

    def observe(kind: Kind, name: str, tensor: torch.Tensor) -> None:
        with _disable_current_modes():  # what recording calls is none of the system's calls
            recorder.observe(kind, name, tensor)

    here = replay.output if step == replay.step and replay.output and replay.output.rank == recorder.rank else None
    with logged(getattr(system, "made", system), keep=here and (here.call, here.output)) as log:
        system.step(step, observe)
    if replay.log:
        remains.add_calls(step, log.calls)
    if log.kept is not None:
        remains.values[OUTPUT] = log.kept


def preload() -> None:
    """Import what every rank needs, once, before ranks are forked."""
    import reference.step  # noqa: F401


def leave() -> None:
    """Leave the process groups, if this process ever joined them."""
    from reference.parallel.mesh import leave_groups

    leave_groups()


def make_system(job: Job, mesh: Mesh, program: Any, injector: Injector) -> System:
    """Build the job's system, whose gradients the injector may tamper with.

    Raises UsageError for one that cannot be loaded or takes no steps.
    """
    if job.system == "graph":
        from harness.graph_step import make_graph_system

        return make_graph_system(job.case, mesh, mesh.device, program, injector.wrap)
    if job.system in BUILT_IN:
        from reference.step import make_eager

        return make_eager(job.case, mesh, mesh.device, job.system == "eager_chunked", injector.wrap)
    from harness.user_system import UserSystem

    factory = load_factory(job.system)
    made = factory.make(job.case, mesh)
    can_wrap = hasattr(made, "wrap_gradients")
    if can_wrap:
        made.wrap_gradients(injector.wrap)
    tamper = injector.ignore if can_wrap else injector.tamper
    return UserSystem(job.system, made, names=job.names, tamper=tamper, origin=factory.origin)


def needs_program(system: str) -> bool:
    """Whether a system runs a prepared graph."""
    return system == "graph"


def prepare_program(case: Case, device: torch.device, options: GraphOptions) -> Any:
    """Trace the case's training step and run the graph passes over it."""
    from harness.graph_step import prepare

    return prepare(case, device, options)


def model_sizes(case: Case) -> dict[str, int]:
    """The sizes of the case's model, by the names of `harness.case.SIZES`."""
    from reference.models import model_config
    from reference.models.sizes import sizes_of

    return sizes_of(model_config(case.model))


def write_standalone(case: Case, options: GraphOptions, step: int, head: str) -> dict[str, Any]:
    """A file that shows by itself what differs between the case's two systems; see `localize.standalone`.

    Options are the candidate's. Raises NoFileError where there can be none.
    """
    import torch

    from harness.graph_step import rank_order_group_source, read_inputs, step_graph
    from harness.localize.standalone import Scene, Side, write_standalone

    tokens = read_inputs(case, step)
    sides: dict[str, Side] = {}
    partitions: dict[str, Any] = {}
    for role, role_options in (("reference", GraphOptions()), ("candidate", options)):
        set_determinism(case.seed)
        graph, groups = step_graph(case, getattr(case, role), torch.device("cpu"), role_options)
        sides[role] = Side.of(graph, list(tokens[0]))
        partitions |= {name: group.partition for name, group in groups.groups.items()}
    scene = Scene(sides, case.parallelism.world_size, partitions, tokens, head, rank_order_group_source())
    return vars(write_standalone(scene))


def options_of_rank(options: GraphOptions, rank: int) -> GraphOptions:
    """A rank's options where every rank prepares its own graph: they are all one, so rank 0 alone writes it down."""
    return options if rank == 0 else replace(options, dump_dir=None)


def describe_program(program: Any) -> dict[str, Any] | None:
    """What the manifest and the report say of a prepared graph; None when there is none."""
    if program is None:
        return None
    passes = [getattr(entry, "to_dict", lambda entry=entry: entry)() for entry in getattr(program, "passes", [])]
    return {"code_hash": program.code_hash, "passes": passes, "seconds": dict(getattr(program, "seconds", {}))}


def _forget_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_mib(device: torch.device) -> float | None:
    """The most device memory that the steps' tensors took at once, as the allocator saw it; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


def _describe_system(system: System) -> dict[str, Any]:
    """What the system says of itself, such as its data's sha256."""
    return dict(system.manifest()) if hasattr(system, "manifest") else {}
