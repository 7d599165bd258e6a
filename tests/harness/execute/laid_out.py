"""The loops of `cases/examples/mesh_loop.py`, wrong in one way each, as a change of layout makes them."""

from __future__ import annotations

from collections.abc import Callable
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
