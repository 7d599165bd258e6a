"""One rank's run of one system: join the groups, build the system, take the steps, record, leave.

Runs in a process that was forked for it alone.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bitproof.harness.capture.generators import Generators
from bitproof.harness.capture.made_of import Differences, Facts, differences, facts_of_rank
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import write_part
from bitproof.harness.capture.values import write_values
from bitproof.harness.case import COMPILED, PREPARED, Case, Kind
from bitproof.harness.disturb.faults import Fault, Injector
from bitproof.harness.disturb.stress import stressed
from bitproof.harness.execute.host.programs import (
    needs_program,
    options_of_rank,
    prepare_program,
    read_precompiled,
    with_fault,
)
from bitproof.harness.execute.profile import phase, showing_digests
from bitproof.harness.execute.requests import ARCHIVE, VALUES
from bitproof.harness.execute.status_messages import (
    Account,
    Done,
    Prepared,
    PreparedGraph,
    Ready,
    StepBegan,
    StepsEnded,
)
from bitproof.harness.execute.stopwatch import Stopwatch, counts_flops, peak_of_process
from bitproof.harness.graph.graph_options import GraphOptions
from bitproof.harness.localize.logs.replay import RECORD, Replay, StepTrace, write_archive
from bitproof.harness.machine.determinism import AFTER_FACTORY, AFTER_STEPS, SET, read_switches, set_determinism
from bitproof.harness.machine.devices import Placement
from bitproof.harness.machine.gpus import read_gpu_environment, read_gpu_facts
from bitproof.harness.machine.nccl import pin_nccl
from bitproof.harness.options import Stress
from bitproof.harness.records import Key
from bitproof.harness.systems.graph_key import GraphCache
from bitproof.harness.systems.registry import BUILT_IN, load_factory

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from bitproof.harness.disturb.regroup import Across
    from bitproof.harness.execute.host.activity_monitor import ActivityMonitor
    from bitproof.harness.execute.meetings import Sums
    from bitproof.harness.execute.requests import StepFolder
    from bitproof.harness.execute.two_halves import Resume
    from bitproof.harness.shared_memory import Board, SharedMemory
    from bitproof.reference.parallel.mesh import Mesh

    Observe = Callable[[Kind, str, torch.Tensor], None]

Tell = Callable[[Account], None]
logger = logging.getLogger("bitproof")


class System(Protocol):
    """Something that can take training steps and show what each computed."""

    def step(self, index: int, observe: Observe) -> None:
        """Take one step; call `observe` for each loss, gradient, buffer, parameter and optimizer state as computed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of one run is to do. `part` is the file that a rank records into, `{rank}` left open.

    With `replay`, the run ends with that step, and the file is what a replay leaves behind; with `values`, ranks
    write the values of tensors that fit these patterns. `names`, unless empty, stands for those that the system
    declares. `program` is the prepared graph when a stage could make it before forking, else each rank makes it by
    `graph_options`, or reads it from `precompiled`. `local_rank`, where it is not the rank, chooses the GPU. With
    `watch` the run leaves beside what it records what a replay would. `is_first` is false for controls and replays,
    which check nothing again that does not depend on the run; nor does the first, where an earlier run of the very
    same code did and left that on the `graph_cache`. `profile` is the folder for what each rank's time went into.
    `is_alone` is false where processes of others, perhaps on other machines, have ranks of the run, too. Times are in
    seconds: `timeout` is what is left of `case_timeout`, the time that the case has in all; `collective_timeout` is
    longer where somebody watches the ranks, who can say more about a hang than a collective.
    `across` and `resume` are the request's.
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
    watch: Replay | None = None
    program: Any = None
    graph_options: GraphOptions = field(default_factory=GraphOptions)
    local_rank: int | None = None
    stress: Stress | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    across: Across | None = None
    resume: Resume | None = None
    is_first: bool = True
    profile: Path | None = None
    graph_cache: GraphCache | None = None
    precompiled: StepFolder | None = None
    is_alone: bool = True

    @property
    def watched(self) -> Replay | None:
        """What is to be left of a step's calls, of a replay or beside a recording."""
        return self.replay or self.watch

    @property
    def steps(self) -> int:
        """How many steps have been taken when the run ends."""
        if self.resume is not None and not self.resume.goes_on:
            return self.resume.at
        return self.case.steps if self.replay is None else self.replay.step + 1

    @property
    def first_step(self) -> int:
        """The run's first step: not 0 where it goes on from what an earlier one saved."""
        return self.resume.at if self.resume is not None and self.resume.goes_on else 0

    def part_of(self, rank: int) -> Path:
        """The file that a rank records into."""
        return Path(self.part.format(rank=rank))

    def archive_of(self, rank: int) -> Path:
        """The file for what a rank leaves of the calls of a step."""
        return self.part_of(rank) if self.replay else self.part_of(rank).with_suffix(ARCHIVE)

    def profile_of(self, rank: int) -> Path | None:
        """The file that tells what a rank's time went into, when the run is profiled."""
        return self.profile / f"rank{rank}.json" if self.profile else None

    def values_of(self, rank: int) -> Path:
        """The file that a rank writes its values into, when it keeps them."""
        return self.part_of(rank).with_suffix(VALUES)


def run_rank(
    job: Job,
    rank: int,
    store: Store,
    tell: Tell,
    memory: SharedMemory | None = None,
    board: Board | None = None,
) -> None:
    """Run one rank to its end, and `tell` how far it is. Its named groups meet in `memory`, where there is some.

    What it launches and waits for in them stands on the `board`.

    Whatever goes wrong is raised; process groups then stay as they are, for the caller to leave or to die with.
    """
    import torch.distributed as dist

    from bitproof.harness.capture.digest import digest
    from bitproof.harness.disturb.regroup import regrouped
    from bitproof.harness.execute.host.activity_monitor import ActivityMonitor
    from bitproof.harness.execute.meetings import Sums
    from bitproof.harness.systems.user_system import UserSystem
    from bitproof.reference.parallel.mesh import Mesh, collectives_in_memory, join_groups, leave_groups, ranks_in

    determinism = set_determinism(
        job.case.seed,
        fill_uninitialized=job.stress is None,
        num_threads=job.stress.num_threads if job.stress else 1,
    )
    switches = {SET: read_switches()}
    device = _device_of(job, rank)
    program = _program_of(job, rank, device)
    tell(Prepared(graph=PreparedGraph.of(program, job.case)))
    mesh = Mesh(rank=rank, parallelism=job.case.parallelism, device=device)
    injector = Injector(job.fault, rank, job.case.parallelism.world_size)
    with phase("join groups"):
        if job.placement.backend == "nccl":
            pin_nccl(os.environ, native=job.placement.native)
        join_groups(
            mesh,
            device,
            store,
            backend=job.placement.backend,
            timeout=job.collective_timeout,
            memory=memory,
            native=job.placement.native,
            disturb=_disturbance(injector),
            board=board,
        )
    tell(Ready())

    cuts, regroup = (job.across.cuts, job.across.regroup) if job.across else ({}, None)
    recorder = Recorder(rank, job.watched.record if job.watched else None, job.values, cuts=cuts)
    observe = injector.unseen(recorder.observe if job.profile is None else showing_digests(recorder.observe))
    step_trace, monitor = StepTrace(), ActivityMonitor(collectives_in_memory)
    sums = Sums(is_asked=job.across is not None)
    observe = sums.noticing(observe)
    disturbed = (stressed(job.stress, rank, device), regrouped(regroup, rank))
    with disturbed[0], disturbed[1], sums.at_work(), injector.at_work(), monitor.at_work():
        with phase("make system"):
            looks_for_mixing = checks_mixing(job, rank)
            system = make_system(job, mesh, program, injector, looks_for_mixing)
        switches[AFTER_FACTORY] = read_switches()
        if not job.is_alone or device.type == "cuda":
            with phase("compare what ranks are made of"):
                agree_on_facts(facts_of_rank(read_gpu_facts(device), with_code=not job.is_alone), store, mesh)
        _forget_peak(device)
        monitor.begin_steps()
        began = time.perf_counter()
        watch = Stopwatch(recorder, device, is_on=_is_timed(job), counts=counts_flops(job.system, rank))
        if job.resume is not None:
            job.resume.begin(system)
        _take_steps(job, system, _Around(recorder, step_trace, injector, monitor, observe, tell, watch, sums))
        if job.resume is not None:
            job.resume.end(system)
        switches[AFTER_STEPS] = read_switches()
        injector.check_fired()
        seconds = time.perf_counter() - began
    tell(StepsEnded())
    _write(job, recorder, step_trace)
    if looks_for_mixing and job.graph_cache is not None:
        job.graph_cache.keep_no_mixing()
    with phase("wait for all ranks"):
        dist.barrier()  # a rank that left early would look to the others like one that died
    logger.debug("%d steps in %.3f s, of which recording %.3f s", job.steps, seconds, recorder.seconds)
    tell(
        Done(
            seconds=seconds,
            record_seconds=recorder.seconds,
            step_seconds=tuple(watch.seconds),
            flops=watch.flops,
            peak_mib=_peak_mib(device),
            process_mib=peak_of_process(),
            determinism=determinism,
            switches=switches,
            system=_describe_system(system),
            gpu=read_gpu_facts(device),
            gpu_environment=read_gpu_environment(os.environ) if device.type == "cuda" else {},
            chunked=getattr(system, "chunked", None) if job.system in BUILT_IN else None,
            unused_names=tuple(system.names.unused) if isinstance(system, UserSystem) else (),
            kept=digest(recorder.kept) if recorder.kept is not None else None,
            is_alone=_is_alone(job, system, monitor.collectives),
            compiled=monitor.compiled,
            meetings=sums.meetings,
            races=tuple(system.races()) if isinstance(system, UserSystem) else (),
            unshown=tuple(system.unshown(recorder.rows)) if isinstance(system, UserSystem) else (),
            turns=tuple(system.turns(ranks_in)) if isinstance(system, UserSystem) else (),
            graph=PreparedGraph.captured(getattr(system, "captured", None)),
        )
    )
    leave_groups()


def _is_timed(job: Job) -> bool:
    """Whether a run's steps are timed: those of a first run, which nothing slows but what it records."""
    return job.is_first and job.replay is None and job.stress is None


class _Around(NamedTuple):
    """What surrounds the steps of a rank."""

    recorder: Recorder
    step_trace: StepTrace
    injector: Injector
    monitor: ActivityMonitor
    observe: Observe
    tell: Tell
    watch: Stopwatch
    sums: Sums


def _take_steps(job: Job, system: System, around: _Around) -> None:
    """Take all steps; a system of a user's may go through them by itself."""
    generators = Generators()

    @contextmanager
    def taking(step: int) -> Iterator[Observe]:
        around.tell(StepBegan(step=step))
        around.recorder.step = step
        around.injector.begin_step(step)
        around.sums.begin_step()
        if job.watched and job.watched.watches(step):
            surroundings = _watching_step(job.watched, step, system, around.recorder, around.step_trace)
        else:
            surroundings = _in_phase(step, around.observe, around.watch)
        with surroundings as shown:
            yield shown
        for name, state in generators.drawn().items():
            if (
                Key(step, "rng", name, around.recorder.rank) not in around.recorder.rows
            ):  # a system may show them itself
                around.recorder.observe("rng", name, state)
        around.monitor.end_step()

    if hasattr(system, "take_steps") and job.resume is None:
        system.take_steps(job.steps, taking)
        return
    for step in range(job.first_step, job.steps):
        with taking(step) as shown:
            system.step(step, shown)


def _is_alone(job: Job, system: System, collectives: int) -> bool:
    """Whether a rank of several ran no collective, though its system does not say that ranks are independent."""
    may_be_alone = getattr(system, "independent_ranks", False)
    return job.case.parallelism.world_size > 1 and not collectives and not may_be_alone


def agree_on_facts(facts: Facts, store: Store, mesh: Mesh) -> None:
    """Go on only once all ranks have said what they are made of, and it is the same.

    Raises CaseError on the ranks that are made of something else than the first one; the others wait to be ended.
    """
    store.set(f"made of/{mesh.rank}", json.dumps(facts))
    if mesh.rank == 0:
        said = [json.loads(store.get(f"made of/{rank}")) for rank in range(mesh.parallelism.world_size)]
        found = differences(said, all_told=False)
        store.set("made of/verdict", json.dumps([found.ranks, found.lines]))
    ranks, lines = json.loads(store.get("made of/verdict"))
    if mesh.rank in ranks:
        Differences(ranks=ranks, lines=lines).refuse()
    if ranks:
        store.get("made of/nothing that ever comes")


def _device_of(job: Job, rank: int) -> torch.device:
    """A rank's device, which is the current one from now on."""
    import torch

    device = torch.device(job.placement.device_of(rank if job.local_rank is None else job.local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.placement.shared and job.placement.backend == "nccl":
        os.environ["NCCL_HOSTID"] = f"bitproof-rank{rank}"  # NCCL refuses two ranks of one host on one GPU
    return device


def _program_of(job: Job, rank: int, device: torch.device) -> Any:
    """The job's program, or the one that this rank makes or reads; None for a system without."""
    if job.program is not None or not needs_program(job.system):
        return job.program
    if job.precompiled is None:
        options = options_of_rank(job.graph_options, rank)
        program = prepare_program(job.case, device, options, system=job.system)
    else:
        program = read_precompiled(job.case, device, job.precompiled, job.system)
    return with_fault(program, job.fault, job.case)


def _write(job: Job, recorder: Recorder, step_trace: StepTrace) -> None:
    """Leave what a run recorded, or what a replay was asked for."""
    if job.replay is None:
        write_part(job.part_of(recorder.rank), recorder.rows.items())
    if job.watched:
        step_trace.records = recorder.rows
        if recorder.kept is not None:
            step_trace.values[RECORD] = recorder.kept
        write_archive(job.archive_of(recorder.rank), step_trace)
    if job.values:
        write_values(job.values_of(recorder.rank), recorder.values)


@contextmanager
def _in_phase(step: int, observe: Observe, watch: Stopwatch) -> Iterator[Observe]:
    with phase(f"step {step}"), watch.running():
        yield observe


@contextmanager
def _watching_step(
    replay: Replay, step: int, system: System, recorder: Recorder, step_trace: StepTrace
) -> Iterator[Observe]:
    """Within this context a step is taken that is watched; keep what the replay asks for."""
    from bitproof.harness.localize.logs.call_log import logged
    from bitproof.harness.torch_compat import disable_current_modes

    def observe(kind: Kind, name: str, tensor: torch.Tensor) -> None:
        with disable_current_modes():  # what recording calls is none of the system's calls
            recorder.observe(kind, name, tensor)

    names, captured = replay.outputs_of(recorder.rank), getattr(system, "captured", None)
    keep = names if step == replay.step else {}
    with logged(getattr(system, "made", system), keep=keep, captured=captured) as log:
        yield observe
    if replay.log:
        step_trace.add_calls(step, log.calls)
    step_trace.values |= {names[site]: value for site, value in log.kept.items()}


def preload() -> None:
    """Import what every rank and every trace needs, once, before any process is forked.

    So is the text that cases train on, unless they name another: it is a module.
    """
    import pydoc_data.topics  # noqa: F401

    import bitproof.harness.graph.analysis.mixing
    import bitproof.harness.systems.user_system
    import bitproof.reference.step  # noqa: F401
    from bitproof.harness.torch_compat import import_tracing

    import_tracing()


def _disturbance(injector: Injector) -> Any:
    """What makes of each process group one that adds in a fault's order; None where no fault asks for that."""
    order, fault = injector.sum_order, injector.fault
    if order is None or fault is None:
        return None
    from bitproof.reference.parallel.other_order_group import OtherOrderGroup

    return lambda group: OtherOrderGroup(group, order, lambda: injector.step >= fault.step, injector.fire)


def make_system(job: Job, mesh: Mesh, program: Any, injector: Injector, looks_for_mixing: bool = False) -> System:
    """Build the job's system, whose gradients the injector may tamper with.

    Raises UsageError for one that cannot be loaded or takes no steps.
    """
    if job.system in PREPARED:
        from bitproof.harness.systems.graph import make_graph_system

        return make_graph_system(job.case, mesh, mesh.device, program, injector.wrap)
    if job.system in BUILT_IN:
        from bitproof.reference.step import make_eager

        check = _mixing_check(job.case) if looks_for_mixing else None
        return make_eager(job.case, mesh, mesh.device, job.system == "eager_chunked", injector.wrap, check)
    from bitproof.harness.systems.user_system import UserSystem, make
    from bitproof.harness.user_code.missing import missing_package

    captured, is_compiled = None, job.system == COMPILED
    factory = load_factory(job.case.reference if is_compiled else job.system)
    try:
        made = make(factory.make, job.case, mesh)
    except ModuleNotFoundError as error:
        raise (missing_package(error, f"system {job.system}") or error) from error
    if is_compiled:
        from bitproof.harness.systems.compiled import compile_models

        work = job.part_of(mesh.rank).with_suffix(".generated")
        captured = compile_models(made, job.case, options_of_rank(job.graph_options, mesh.rank), work)
    can_wrap = hasattr(made, "wrap_gradients")
    if can_wrap:
        made.wrap_gradients(injector.wrap)
    tamper = injector.ignore if can_wrap else injector.tamper
    return UserSystem(job.system, made, names=job.names, tamper=tamper, origin=factory.origin, captured=captured)


def checks_mixing(job: Job, rank: int) -> bool:
    """Whether this rank looks for mixing: one does, in a first run, unless an earlier one found none."""
    is_asked_for = job.system == "eager_chunked" and rank == 0 and job.is_first
    return is_asked_for and not (job.graph_cache and job.graph_cache.has_no_mixing())


def _mixing_check(case: Case) -> Any:
    """What refuses chunked modules that mix rows; one rank's verdict is every rank's, as all run the same modules."""
    from bitproof.harness.graph.analysis.mixing import MixingCheck
    from bitproof.reference.chunking import DIM_INDEX

    assert case.chunking is not None, "Case refuses eager_chunked without chunking"
    return MixingCheck(case.chunking.dim, DIM_INDEX[case.chunking.dim])


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
