"""Run a system on a rank: join the process groups, build the system, run the steps, record, leave the groups.

This runs in a process that is forked for this rank only.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bitproof.harness.capture.rank_fingerprint import Differences, Facts, differences, facts_of_rank
from bitproof.harness.disturb.injection import Injection
from bitproof.harness.execute.host.job import Job
from bitproof.harness.execute.host.rank_steps import RankSteps, Send
from bitproof.harness.execute.host.rank_system import (
    System,
    checks_mixing,
    device_of,
    make_system,
    program_of,
    wrong_order_wrapper,
)
from bitproof.harness.execute.instruments.profile import phase
from bitproof.harness.execute.instruments.stopwatch import peak_of_process
from bitproof.harness.execute.preloaded import check_preloaded
from bitproof.harness.execute.status_messages import Done, Prepared, PreparedGraph, Ready, StepsEnded
from bitproof.harness.machine.determinism import AFTER_FACTORY, AFTER_STEPS, SET, read_switches, set_determinism
from bitproof.harness.machine.gpus import read_gpu_environment, read_gpu_facts
from bitproof.harness.machine.nccl import pin_nccl
from bitproof.harness.records import MachineFacts
from bitproof.harness.systems.registry import BUILT_IN

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from bitproof.harness.execute.requests import RunRequest
    from bitproof.harness.shared_memory import Board, SharedMemory
    from bitproof.reference.parallel.mesh import Mesh


def run_rank(
    job: Job,
    rank: int,
    store: Store,
    send: Send,
    memory: SharedMemory | None = None,
    board: Board | None = None,
) -> None:
    """Run a rank from start to end, and pass reports of its progress to `send`.

    - `memory`: shared memory for the rank's collectives; None if they use a backend of torch.
    - `board`: shared memory in which the rank notes its collectives, for the error of a hang.

    After an error, the process groups are left as they are.
    """
    import torch.distributed as dist

    from bitproof.reference.parallel.mesh import Mesh, leave_groups

    run, stress = job.run, job.run.options.stress
    # First of all: these switches decide which kernels torch chooses, and the seed is that of its generators.
    determinism = set_determinism(
        run.case.seed, fill_uninitialized=stress is None, num_threads=stress.num_threads if stress else 1
    )
    switches = {SET: read_switches()}
    device = device_of(job, rank)
    job = replace(job, graph_cache=job.graph_cache and job.graph_cache.of_rank(rank, device))
    program = program_of(job, rank, device)
    send(Prepared(graph=PreparedGraph.of(program, run.case)))
    mesh = Mesh(rank=rank, parallelism=run.case.parallelism, device=device)
    injector = _injection(run, rank)
    with phase("join groups"):
        _join_groups(job, mesh, store, injector, memory, board)
    send(Ready())

    steps = RankSteps(job, rank, device, injector, send)
    with steps.at_work():
        with phase("make system"):
            looks_for_mixing = rank == 0 and checks_mixing(job.run, job.graph_cache)
            system = make_system(job, mesh, program, injector, looks_for_mixing)
            check_preloaded()
        switches[AFTER_FACTORY] = read_switches()
        # Ranks forked from one process have the same code, but on GPUs each rank reads its own device's facts.
        if not job.is_alone or device.type == "cuda":
            with phase("compare what ranks are made of"):
                refuse_other_facts(facts_of_rank(read_gpu_facts(device), with_code=not job.is_alone), store, mesh)
        # Peak memory counts from the first step: making the system is not part of it.
        _forget_peak(device)
        steps.take(system)
        check_preloaded()
        if not job.is_alone:  # modules that a step imported late
            with phase("compare what ranks are made of"):
                refuse_other_facts(facts_of_rank(read_gpu_facts(device)), store, mesh, "in the end")
        switches[AFTER_STEPS] = read_switches()
        injector.check_fired()
    # From here the watcher knows that a silent rank is writing, not hanging in a step.
    send(StepsEnded())
    steps.write()
    if looks_for_mixing and job.graph_cache is not None:
        job.graph_cache.keep_no_mixing()
    with phase("wait for all ranks"):
        dist.barrier()  # if a rank left early, the others would report it as dead
    send(_done_message(job, system, steps, determinism, switches))
    if job.is_killed:
        signal.pause()  # until the watcher kills all ranks at once
    leave_groups()


def _injection(run: RunRequest, rank: int) -> Injection:
    if run.fault is None:
        return Injection()
    # Imported here, as few runs have a fault.
    from bitproof.harness.disturb.faults import Injector

    return Injector(run.fault, rank, run.case.parallelism.world_size)


def _join_groups(
    job: Job, mesh: Mesh, store: Store, injector: Injection, memory: SharedMemory | None, board: Board | None
) -> None:
    from bitproof.reference.parallel.mesh import join_groups

    placement = job.run.placement
    # NCCL reads its variables when it starts, so they are set before a group is made.
    if placement.backend == "nccl":
        pin_nccl(os.environ, native=placement.native)
    join_groups(
        mesh,
        mesh.device,
        store,
        backend=placement.backend,
        timeout=job.collective_timeout,
        memory=memory,
        native=placement.native,
        disturb=wrong_order_wrapper(injector),
        board=board,
    )


def _done_message(
    job: Job, system: System, steps: RankSteps, determinism: dict[str, Any], switches: dict[str, dict[str, Any]]
) -> Done:
    from bitproof.harness.capture.digest import digest
    from bitproof.harness.systems.user_system import UserSystem
    from bitproof.reference.parallel.mesh import ranks_in

    # Some facts are only about a user's system, such as the names that it declares.
    recorder, users = steps.recorder, system if isinstance(system, UserSystem) else None
    return Done(
        seconds=steps.seconds,
        record_seconds=recorder.seconds,
        step_seconds=tuple(steps.stopwatch.seconds),
        flops=steps.stopwatch.flops,
        peak_mib=_peak_mib(steps.device),
        process_mib=peak_of_process(),
        determinism=determinism,
        switches=switches,
        system=dict(system.manifest()) if hasattr(system, "manifest") else {},
        gpu=_gpu_facts(job, steps.device),
        gpu_environment=read_gpu_environment(os.environ) if steps.device.type == "cuda" else {},
        chunked=getattr(system, "chunked", None) if job.run.system in BUILT_IN else None,
        unused_names=tuple(users.names.unused) if users else (),
        kept=digest(recorder.kept) if recorder.kept is not None else None,
        is_alone=_is_alone(job, system, steps.monitor.collectives),
        compiled=steps.monitor.compiled,
        meetings=steps.across.sums.meetings if steps.across else None,
        narrow=steps.across.widened.narrow if steps.across and steps.across.widened else None,
        races=tuple(users.races()) if users else (),
        unshown=tuple(users.unshown(recorder.rows)) if users else (),
        shows_every_buffer=users is not None and users.shows_every_buffer,
        queue_entries=tuple(users.queue_entries(ranks_in)) if users else (),
        graph=PreparedGraph.captured(getattr(system, "captured", None)),
    )


def _gpu_facts(job: Job, device: torch.device) -> MachineFacts | None:
    from bitproof.reference.parallel.device_order_group import sums_of

    facts, placement = read_gpu_facts(device), job.run.placement
    if facts is None or placement.backend != "nccl":
        return facts
    return facts | {"sums_over_ranks": "NCCL's own" if placement.native else sums_of(device)}


def _is_alone(job: Job, system: System, collectives: int) -> bool:
    may_be_alone = getattr(system, "independent_ranks", False)
    return job.run.case.parallelism.world_size > 1 and not collectives and not may_be_alone


def refuse_other_facts(facts: Facts, store: Store, mesh: Mesh, when: str = "at the start") -> None:
    """Compare the versions and code of all ranks. Returns if all are the same.

    If not, ranks that differ from rank 0 raise CaseError, and the others block until they are killed. `when` is a part
    of this comparison's keys in `store`, so each comparison needs a different text.
    """
    about = f"made of {when}"
    store.set(f"{about}/{mesh.rank}", json.dumps(facts))
    # Only rank 0 compares, so all ranks get the same verdict. `get` waits until the key is set.
    if mesh.rank == 0:
        facts_by_rank = [json.loads(store.get(f"{about}/{rank}")) for rank in range(mesh.parallelism.world_size)]
        found = differences(facts_by_rank, must_all_have=False)
        store.set(f"{about}/verdict", json.dumps([found.ranks, found.lines]))
    ranks, lines = json.loads(store.get(f"{about}/verdict"))
    if mesh.rank in ranks:
        Differences(ranks=ranks, lines=lines).refuse()
    if ranks:
        # The ranks that differ raise the error; this rank must not fail first, so it waits to be killed.
        store.get(f"{about}/nothing that ever comes")


def preload() -> None:
    """Import the modules that every rank needs, once, before any process is forked."""
    # The default text for training.
    import pydoc_data.topics  # noqa: F401

    import bitproof.harness.execute.host.activity_monitor
    import bitproof.harness.systems.user_system
    import bitproof.reference.step  # noqa: F401
    from bitproof.harness.systems import default_group
    from bitproof.harness.torch_compat import use_profiler_once

    # Before user code can import the replaced functions by name.
    default_group.install()
    use_profiler_once()


def _forget_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_mib(device: torch.device) -> float | None:
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
