"""The loops of `cases/examples/mesh_loop.py`, wrong in one way each, as a change of layout makes them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import bitproof
from bitproof import Case, Mesh
from bitproof.builtin_cases.examples import mesh_loop, resumed_loop
from bitproof.builtin_cases.examples.mesh_loop import MeshLoop
from bitproof.builtin_cases.examples.resumed_loop import ResumedLoop
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.disturb.faults.clock import NOW

Loop = TypeVar("Loop", bound=MeshLoop)


def with_fault(own: Callable[[Case, Mesh], MeshLoop], name: str) -> Callable[[Case, Mesh], MeshLoop]:
    """The loop with a fault of the catalogue."""

    def factory(case: Case, mesh: Mesh) -> MeshLoop:
        NOW.rank, NOW.world_size = mesh.rank, mesh.parallelism.world_size  # as a run with an injected fault does
        loop = own(case, mesh)
        runner = CATALOGUE[name].runner
        assert runner is not None
        runner(loop)
        return loop

    return factory


doubled_under_ep = with_fault(mesh_loop.ep, "expert-gradient-doubled")
norm_left_alone = with_fault(mesh_loop.ep, "norm-gradient-not-summed")
exchanged_shards = with_fault(mesh_loop.fsdp, "shards-exchanged")
one_replica_exchanged = with_fault(mesh_loop.hsdp, "one-replica-exchanges-shards")
reversed_rows = with_fault(mesh_loop.fsdp, "gradient-rows-reversed")
late_loader = with_fault(mesh_loop.ddp, "loader-one-batch-late")
mean_of_means = with_fault(mesh_loop.uneven_halves, "mean-of-means")
generator_not_restored = with_fault(mesh_loop.fsdp, "generator-not-restored")
moments_of_the_wrong_shard = with_fault(mesh_loop.fsdp, "moments-of-the-wrong-shard")
schedule_not_restored = with_fault(mesh_loop.fsdp, "schedule-not-restored")


def loss_off_by_little(case: Case, mesh: Mesh) -> MeshLoop:
    """A loss that is off by two units in the last place."""
    loop = mesh_loop.ddp(case, mesh)
    own = loop.loss
    loop.loss = lambda rows: own(rows) * (1 + 2e-7)  # type: ignore[method-assign]
    return loop


def float32_alone(case: Case, mesh: Mesh) -> MeshLoop:
    """A trainer that refuses other dtypes."""
    loop = mesh_loop.ddp(case, mesh)
    own = loop.loss

    def loss(rows: Tensor) -> Tensor:
        found = own(rows)
        if found.dtype != torch.float32:
            raise TypeError(f"needs float32, not {found.dtype}")
        return found

    loop.loss = loss  # type: ignore[method-assign]
    return loop


def scaled_by_numpy(case: Case, mesh: Mesh) -> MeshLoop:
    """The loss times a number, and by it again: NumPy rounded one of the two to float32."""
    loop = mesh_loop.ddp(case, mesh)
    own = loop.loss
    third = torch.from_numpy(numpy.array(1 / 3, dtype=numpy.float32))
    loop.loss = lambda rows: own(rows) * third * 3  # type: ignore[method-assign]
    return loop


def whole(case: Case, mesh: Mesh) -> Any:
    """A watched step under DistributedDataParallel, of sizes that no number of ranks divides."""
    return _watched(mesh, DistributedDataParallel(_small()))


def flattened(case: Case, mesh: Mesh) -> Any:
    """The same under FSDP1, whose ranks hold parts of parameters, or none."""
    return _watched(mesh, FullyShardedDataParallel(_small(), use_orig_params=True, device_id=torch.device("cpu")))


def rows_sharded(case: Case, mesh: Mesh) -> Any:
    """The same under FSDP2."""
    model = _small()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return _watched(mesh, model)


def flattened_wrong(case: Case, mesh: Mesh) -> Any:
    """One element of a weight, the last that rank 1 has, moves after each step."""
    system = flattened(case, mesh)
    weight = system.trained_parameters()["2.weight"]

    def moved(*_: Any) -> None:
        if mesh.rank == 1:
            weight.data[-1] += 1e-3

    system.watched_optimizers[0].register_step_post_hook(moved)
    return system


def rows_without_one_gradient(case: Case, mesh: Mesh) -> Any:
    """The same under FSDP2, of another learning rate, with a gradient of None from the second step on."""
    return _without_one_gradient(rows_sharded(case, mesh))


def flattened_without_one_gradient(case: Case, mesh: Mesh) -> Any:
    """The same under FSDP1."""
    return _without_one_gradient(flattened(case, mesh))


def _without_one_gradient(system: Any) -> Any:
    (optimizer,) = system.watched_optimizers
    optimizer.param_groups[0]["lr"] = 2e-3
    bias = system.trained_parameters()["2.bias"]

    def lose(*_: Any) -> None:
        if optimizer.state:
            bias.grad = None

    optimizer.register_step_pre_hook(lose)
    return system


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7))


def _watched(mesh: Mesh, model: nn.Module) -> Any:
    optimizer, data = torch.optim.AdamW(model.parameters(), foreach=False), torch.Generator().manual_seed(5)

    def step(index: int) -> Tensor:
        x = torch.randn(8, 7, generator=data).chunk(dist.get_world_size())[mesh.rank]
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=optimizer)


def generator_of_rank_0(case: Case, mesh: Mesh) -> ResumedLoop:
    """Generators are saved under one name, so that each rank gets back that of rank 0."""
    return _renaming(resumed_loop.fsdp(case, mesh), lambda name: name.partition(".")[0])


def buffer_not_restored(case: Case, mesh: Mesh) -> ResumedLoop:
    """A buffer is no part of what is saved."""
    return _resuming(resumed_loop.fsdp(case, mesh), lambda loop: loop.bare.text.zero_())


def moments_rounded(case: Case, mesh: Mesh) -> ResumedLoop:
    """Moments come back in half precision, in another layout: no sum explains that."""
    return _resuming(resumed_loop.fsdp_tp(case, mesh), _round_moments)


def moments_rounded_by_fewer(case: Case, mesh: Mesh) -> ResumedLoop:
    """The same on other ranks than those that saved."""
    return _resuming(resumed_loop.ddp(case, mesh), _round_moments)


def _round_moments(loop: ResumedLoop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].copy_(state["exp_avg"].bfloat16())


def loaded(case: Case, mesh: Mesh) -> ResumedLoop:
    """It goes on from what others saved."""
    loop = resumed_loop.fsdp(case, mesh)
    loop.load(Path(case.options["saved"]))
    return loop


def loaded_wrong(case: Case, mesh: Mesh) -> ResumedLoop:
    """Of what others saved it has one matrix's rows in another order."""
    loop = loaded(case, mesh)
    weight: Any = loop.model.blocks[0].up.weight  # type: ignore[union-attr,index]
    with torch.no_grad():
        weight.to_local().copy_(weight.to_local().flip(0))
    return loop


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
