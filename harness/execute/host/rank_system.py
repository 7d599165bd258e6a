"""Make a rank's device, graph and system, with the faults and checks around the system."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bitproof.harness.case import COMPILED, PREPARED, Case, Kind
from bitproof.harness.disturb.injection import Injection
from bitproof.harness.execute.host.job import Job
from bitproof.harness.execute.host.programs import (
    needs_program,
    options_of_rank,
    prepare_program,
    read_precompiled,
    with_fault,
)
from bitproof.harness.machine.determinism import settle_attention
from bitproof.harness.machine.nccl import allow_shared_gpu
from bitproof.harness.systems.registry import BUILT_IN, load_factory, program_name
from bitproof.harness.user_code.user_frames import user_code

if TYPE_CHECKING:
    import torch

    from bitproof.harness.execute.requests import RunRequest
    from bitproof.harness.systems.graph_key import GraphCache
    from bitproof.reference.parallel.mesh import Mesh

    Observe = Callable[[Kind, str, torch.Tensor], None]


class System(Protocol):
    """A training system: it takes steps, and passes the tensors of each step to an observer."""

    def step(self, index: int, observe: Observe) -> None:
        """Run step `index`; call `observe` for each loss, gradient, buffer, parameter and optimizer state once it is
        computed.
        """


def device_of(job: Job, rank: int) -> torch.device:
    """Return a rank's device. If it is a GPU, it becomes this process's current device."""
    import torch

    placement = job.run.placement
    device = torch.device(placement.device_of(job.device_index_of(rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        settle_attention(device)
    if placement.shared and placement.backend == "nccl":
        allow_shared_gpu(os.environ, rank)
    return device


def program_of(job: Job, rank: int, device: torch.device) -> Any:
    """Return the graph that this rank runs; None for a system without a graph.

    If a graph was prepared before ranks were forked, the rank runs that graph. Otherwise the rank traces or reads a
    graph.
    """
    run = job.run
    if job.program is not None or not needs_program(run.system):
        return job.program
    if run.precompiled is None:
        program = _kept_or_made(job, rank, device)
    else:
        program = read_precompiled(run.case, device, run.precompiled, run.system)
    return with_fault(program, run.fault, run.case)


def _kept_or_made(job: Job, rank: int, device: torch.device) -> Any:
    from bitproof.harness.systems.cached_graph import keep_program, read_program

    run = job.run
    graph_cache = job.graph_cache if device.type == "cuda" else None  # on a CPU a stage reads it, for all ranks
    program = None if graph_cache is None else read_program(graph_cache)
    if program is not None:
        return program
    program = prepare_program(run.case, device, options_of_rank(run.graph_options, rank), system=run.system)
    if graph_cache is not None:
        keep_program(graph_cache, program, run.case)
    return program


def wrong_order_wrapper(injector: Injection) -> Any:
    """Return a function that wraps a process group, so that it adds over ranks in the order of the injected fault.

    Return None if there is no fault, or a fault that does not change the order of sums.
    """
    order, fault = injector.sum_order, injector.fault
    if order is None or fault is None:
        return None
    from bitproof.reference.parallel.other_order_group import OtherOrderGroup

    return lambda group: OtherOrderGroup(group, order, lambda: injector.step >= fault.step, injector.fire)


def make_system(job: Job, mesh: Mesh, program: Any, injector: Injection, looks_for_mixing: bool = False) -> System:
    """Make the system that a rank runs. Raises UsageError if it cannot be loaded, or has no method that takes steps.

    - `injector`: injects the run's fault.
    - `looks_for_mixing`: check that chunked modules compute each row independently.
    """
    name, case = job.run.system, job.run.case
    if name in PREPARED:
        from bitproof.harness.systems.graph_program import make_graph_system

        graph_system = make_graph_system(case, mesh, mesh.device, program, injector.wrap)
        injector.strike_runner(graph_system.graph)
        return graph_system
    if name in BUILT_IN:
        from bitproof.reference.step import make_eager

        check = _mixing_check(case) if looks_for_mixing else None
        return make_eager(case, mesh, mesh.device, name == "eager_chunked", injector.wrap, check)
    from bitproof.harness.systems.user_system import UserSystem, make
    from bitproof.harness.user_code.missing import missing_package

    # The system `compiled` is the reference's own code, with its models compiled.
    captured, is_compiled = None, name == COMPILED
    own = case.reference if is_compiled else name
    sys.argv[:] = [program_name(own)]  # a trainer must not see the command line of bitproof
    with user_code(f"system {own}"):
        factory = load_factory(own, job.run.work, _own_folders(job))
        try:
            made = make(factory.make, case, mesh)
        except ModuleNotFoundError as error:
            raise (missing_package(error, f"system {name}") or error) from error
    if is_compiled:
        from bitproof.harness.systems.compiled import compile_models

        work = job.part_of(mesh.rank).with_suffix(".generated")
        captured = compile_models(made, case, options_of_rank(job.run.graph_options, mesh.rank), work)
    injector.strike_runner(made)
    # Then a fault changes gradients before anything reads them. In other systems it changes gradients when they are
    # recorded.
    if hasattr(made, "wrap_gradients"):
        made.wrap_gradients(injector.wrap)
    return UserSystem(name, made, names=job.run.options.names, origin=factory.origin, captured=captured)


def _own_folders(job: Job) -> tuple[Path, ...]:
    # These folders may be inside the working directory, whose files identify the user's code.
    logs = job.run.logs.parents[1]
    return (job.run.out, logs.parent if logs.name == "logs" else job.run.logs)


def checks_mixing(request: RunRequest, graph_cache: GraphCache | None) -> bool:
    """Whether rank 0 of a run must check that chunked modules compute each row independently of the others.

    True in the first run of `eager_chunked`, unless an earlier run of the same code passed this check.
    """
    is_asked_for = request.system == "eager_chunked" and request.is_first
    return is_asked_for and not (graph_cache and graph_cache.has_no_mixing())


def _mixing_check(case: Case) -> Any:
    from bitproof.harness.graph.analysis.mixing import MixingCheck

    assert case.chunking is not None, "Case refuses eager_chunked without chunking"
    return MixingCheck(case.chunking.dim, case.chunk_dim)
