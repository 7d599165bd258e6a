"""The loops of `cases/examples/mesh_loop.py`, wrong in one way each, as a change of layout makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitproof import Case, Mesh
from bitproof.builtin_cases.examples import mesh_loop
from bitproof.builtin_cases.examples.mesh_loop import ExpertLoop, MeshLoop


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


def _resuming(loop: MeshLoop, change: Callable[[MeshLoop], Any]) -> MeshLoop:
    own = loop.load

    def load(folder: Path) -> None:
        own(folder)
        with torch.no_grad():
            change(loop)

    loop.load = load  # type: ignore[method-assign]
    return loop
