"""The loops of `cases/examples/mesh_loop.py`, wrong in one way each, as a change of layout makes them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from bitproof import Case, Mesh
from bitproof.builtin_cases.examples import mesh_loop, resumed_loop
from bitproof.builtin_cases.examples.mesh_loop import ExpertLoop, MeshLoop
from bitproof.builtin_cases.examples.resumed_loop import ResumedLoop

Loop = TypeVar("Loop", bound=MeshLoop)


def doubled_under_ep(case: Case, mesh: Mesh) -> MeshLoop:
    """Experts' gradients are divided by the ranks of a group, and not by all."""
    loop = ExpertLoop(case, mesh)
    return _changed(loop, lambda: loop.experts.weight.grad.mul_(2))


def norm_left_alone(case: Case, mesh: Mesh) -> MeshLoop:
    """A norm's gradient is never added over ranks: each keeps its own."""
    loop = ExpertLoop(case, mesh)
    norm = loop.experts.norm.weight
    found: list[Tensor] = []
    norm.register_hook(lambda grad: found.append(grad.clone()))
    return _changed(loop, lambda: norm.grad.copy_(found.pop() / loop.world))


def exchanged_shards(case: Case, mesh: Mesh) -> MeshLoop:
    """Ranks 0 and 1 load each other's part of a matrix at the start."""
    loop = mesh_loop.fsdp(case, mesh)
    part = loop.model.blocks[0].up.weight.to_local()  # type: ignore[index,union-attr,operator]
    with torch.no_grad():
        if mesh.rank < 2:
            theirs = torch.empty_like(part)
            calls = [dist.P2POp(dist.isend, part.clone(), 1 - mesh.rank), dist.P2POp(dist.irecv, theirs, 1 - mesh.rank)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            part.copy_(theirs)
    return loop


def late_loader(case: Case, mesh: Mesh) -> MeshLoop:
    """The loader is one batch behind."""
    loop = mesh_loop.ddp(case, mesh)
    loop.batch()
    return loop


def mean_of_means(case: Case, mesh: Mesh) -> MeshLoop:
    """Micro-batches of unequal size count alike."""
    loop = mesh_loop.ddp(case, mesh)

    def backward() -> Tensor:
        rows = loop.batch()
        total = torch.zeros(())
        for part in rows.tensor_split([1]):
            loss = loop.loss(part) / 2
            loss.backward()
            total += loss.detach()
        if loop.world > 1:
            dist.all_reduce(total)
        return total / loop.world

    loop.backward = backward  # type: ignore[method-assign]
    return loop


def _changed(loop: MeshLoop, change: Callable[[], Any]) -> MeshLoop:
    own = loop.backward

    def backward() -> Tensor:
        total = own()
        change()
        return total

    loop.backward = backward  # type: ignore[method-assign]
    return loop


def generator_not_restored(case: Case, mesh: Mesh) -> MeshLoop:
    """The data's generator begins anew after a resume."""
    return _resuming(mesh_loop.fsdp(case, mesh), lambda loop: loop.data.manual_seed(1000 + case.seed))


def one_batch_late(case: Case, mesh: Mesh) -> MeshLoop:
    """After a resume the loader has read one batch too many."""
    return _resuming(mesh_loop.fsdp(case, mesh), lambda loop: loop.batch())


def moments_of_the_wrong_shard(case: Case, mesh: Mesh) -> MeshLoop:
    """After a resume each rank has a neighbour's first moments of one matrix."""

    def exchange(loop: MeshLoop) -> None:
        state = loop.optimizer.state[loop.model.blocks[0].up.weight]["exp_avg"]  # type: ignore[index,union-attr]
        part = state.to_local()
        parts = [torch.empty_like(part) for _ in range(loop.world)]
        dist.all_gather(parts, part.clone())
        part.copy_(parts[(mesh.rank + 1) % loop.world])

    return _resuming(mesh_loop.fsdp(case, mesh), exchange)


def schedule_not_restored(case: Case, mesh: Mesh) -> MeshLoop:
    """The learning rate warms up a second time."""

    def restart(loop: MeshLoop) -> None:
        loop.schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: min(1.0, (step + 1) / 4))

    return _resuming(mesh_loop.fsdp(case, mesh), restart)


def generator_of_rank_0(case: Case, mesh: Mesh) -> ResumedLoop:
    """Generators are saved under one name, so that each rank gets back that of rank 0."""
    return _renaming(resumed_loop.fsdp(case, mesh), lambda name: name.partition(".")[0])


def buffer_not_restored(case: Case, mesh: Mesh) -> ResumedLoop:
    """A buffer is no part of what is saved."""
    return _resuming(resumed_loop.fsdp(case, mesh), lambda loop: loop.bare.text.zero_())


def moments_rounded(case: Case, mesh: Mesh) -> ResumedLoop:
    """Moments come back in half precision, in another layout: no sum explains that."""

    def rounded(loop: ResumedLoop) -> None:
        for state in loop.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())

    return _resuming(resumed_loop.fsdp_tp(case, mesh), rounded)


def lacks_a_key(case: Case, mesh: Mesh) -> ResumedLoop:
    """The checkpoint has no learning rate."""
    loop = resumed_loop.fsdp(case, mesh)
    loop.save = lambda folder: dcp.save(  # type: ignore[method-assign]
        {name: part for name, part in loop.state().items() if name != "schedule"}, checkpoint_id=folder
    )
    return loop


def of_other_code(case: Case, mesh: Mesh) -> ResumedLoop:
    """The checkpoint is of a model whose output is wider."""
    loop = resumed_loop.fsdp(case, mesh)

    def save(folder: Path) -> None:
        state = loop.state()
        weight = state["model"]["output.weight"].full_tensor()
        dcp.save(
            state | {"model": state["model"] | {"output.weight": torch.cat([weight, weight])}}, checkpoint_id=folder
        )

    loop.save = save  # type: ignore[method-assign]
    return loop


def killed_as_it_saves(case: Case, mesh: Mesh) -> ResumedLoop:
    """Rank 1 is killed in the midst of the save."""
    loop = resumed_loop.fsdp(case, mesh)
    own = loop.state

    def state() -> dict[str, Any]:
        if mesh.rank == 1 and loop.taken:
            os.kill(os.getpid(), signal.SIGKILL)
        return own()

    loop.state = state  # type: ignore[method-assign]
    return loop


def half_written(case: Case, mesh: Mesh) -> ResumedLoop:
    """A rank's file of the checkpoint is cut in half, as a full disk leaves it."""
    loop = resumed_loop.fsdp(case, mesh)
    own = loop.save

    def save(folder: Path) -> None:
        own(folder)
        if mesh.rank == 0:
            file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
            os.truncate(file, file.stat().st_size // 2)

    loop.save = save  # type: ignore[method-assign]
    return loop


def saved_later(case: Case, mesh: Mesh) -> ResumedLoop:
    """A thread is to write the checkpoint in a while, and nobody waits for it."""
    loop = resumed_loop.fsdp(case, mesh)
    own = loop.save
    loop.save = lambda folder: threading.Timer(30, own, [folder]).start()  # type: ignore[method-assign]
    return loop


def saves_nothing(case: Case, mesh: Mesh) -> MeshLoop:
    """Each process begins with its own weights, and none of what was trained."""
    loop = mesh_loop.fsdp(case, mesh)
    loop.save = loop.load = lambda folder: None  # type: ignore[method-assign,assignment]
    return loop


def cannot_save(case: Case, mesh: Mesh) -> MeshLoop:
    """There is no way to save it."""
    loop = mesh_loop.fsdp(case, mesh)
    loop.save = None  # type: ignore[method-assign,assignment]
    return loop


def _renaming(loop: ResumedLoop, renamed: Callable[[str], str]) -> ResumedLoop:
    own, name = loop.state, f"generator.{loop.own}"

    def state() -> dict[str, Any]:
        found = own()
        return found | {renamed(name): found[name]}

    def load(folder: Path) -> None:
        ResumedLoop.load(loop, folder)
        found = {renamed(name): torch.get_rng_state()}
        dcp.load(found, checkpoint_id=folder)
        torch.set_rng_state(found[renamed(name)])

    loop.state, loop.load = state, load  # type: ignore[method-assign]
    return loop


def _resuming(loop: Loop, change: Callable[[Loop], Any]) -> Loop:
    own = loop.load

    def load(folder: Path) -> None:
        own(folder)
        with torch.no_grad():
            change(loop)

    loop.load = load  # type: ignore[method-assign]
    return loop
