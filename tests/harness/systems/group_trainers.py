"""Trainers that make the default process group and destroy it themselves, as scripts do. `case.options` says how."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bitproof

LAST = 1


class Trainer:
    """A linear model under DDP, or FSDP2."""

    def __init__(self, *, shards: bool = False, takes_sum: bool = True) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        self.model: Any = fully_shard(layers) if shards else layers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(dist.get_rank())
        self.is_sharded = shards

    def step(self, index: int) -> Tensor:
        loss: Tensor = self.model(torch.randn(2, 4, generator=self.data)).square().mean()
        loss.backward()
        if not self.is_sharded and dist.is_initialized():  # as a careful script has it
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def watched(self, step: Any = None) -> Any:
        return bitproof.watch(step or self.step, model=self.model, optimizer=self.optimizer)


def plain(case: Any, mesh: Any) -> Any:
    return Trainer(shards=case.options.get("shards", False)).watched()


def plain_loop() -> Any:
    made = Trainer()
    return bitproof.watch(train=lambda: [made.step(index) for index in range(9)], model=made.model)


def made_by_itself(case: Any, mesh: Any) -> Any:
    """Makes the default group with what the case's options say."""
    given = dict(case.options["given"])
    if "timeout" in given:
        given["timeout"] = timedelta(hours=given["timeout"])
    if given.pop("own_numbers", False):
        given |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    os.environ.update(case.options.get("environment", {}))
    init_process_group(**given)
    return plain(case, mesh)


def made_by_position(case: Any, mesh: Any) -> Any:
    dist.init_process_group("gloo", "env://", timedelta(minutes=5), dist.get_world_size(), dist.get_rank())
    return plain(case, mesh)


def made_twice(case: Any, mesh: Any) -> Any:
    """A second call raises what torch raises, which a script may expect."""
    init_process_group("gloo")
    try:
        init_process_group("gloo")
    except ValueError as error:
        assert "twice" in str(error)
        return plain(case, mesh)
    raise AssertionError("it may be made twice")


def destroyed_in_the_last_step(case: Any, mesh: Any) -> Any:
    made = Trainer(shards=case.options.get("shards", False))

    def step(index: int) -> Tensor:
        loss = made.step(index)
        if index == LAST and mesh.rank in case.options.get("on", (0, 1)):
            destroy_process_group()
            assert not dist.is_initialized()
            with suppress(ValueError):
                dist.get_rank()
                raise AssertionError("there is a group")
        return loss

    return made.watched(step)


def destroyed_by_name(case: Any, mesh: Any) -> Any:
    made = Trainer()

    def step(index: int) -> Tensor:
        loss = made.step(index)
        if index == LAST:
            own = dist.new_group([0, 1])
            dist.destroy_process_group(own)
            assert dist.is_initialized()
            dist.destroy_process_group(dist.group.WORLD)
            assert not dist.is_initialized()
            try:
                dist.destroy_process_group()
            except AssertionError:
                return loss
            raise RuntimeError("it was destroyed twice")
        return loss

    return made.watched(step)


def made_and_destroyed_in_each_step(case: Any, mesh: Any) -> Any:
    made = Trainer()

    def step(index: int) -> Tensor:
        init_process_group("gloo")
        try:
            return made.step(index)
        finally:
            destroy_process_group()

    return made.watched(step)


@contextmanager
def group() -> Iterator[None]:
    init_process_group("cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        destroy_process_group()


def destroyed_after_the_loop() -> Any:
    made = Trainer()
    atexit.register(destroy_process_group)

    def train() -> None:
        with group():
            for index in range(9):
                made.step(index)

    return bitproof.watch(train=train, model=made.model)


def destroyed_too_early(case: Any, mesh: Any) -> Any:
    """Sums no gradients in the last step: alone, it would train otherwise from there on."""
    made = Trainer()

    def step(index: int) -> Tensor:
        if index == LAST:
            destroy_process_group()
        return made.step(index)

    return made.watched(step)


def destroyed_in_the_factory(case: Any, mesh: Any) -> Any:
    """A script that probes the group first, and makes it again, for a mesh."""
    destroy_process_group()
    mesh = init_device_mesh("cpu", (2,))
    assert mesh.size() == 2
    return plain(case, mesh)


def saving(case: Any, mesh: Any) -> Any:
    made = Trainer()
    system = made.watched()
    file = f"{case.options['below']}rank{mesh.rank}.pt"

    def save(folder: Path) -> None:
        assert folder.is_dir() and not [*folder.glob("rank*")][2:]
        for parent in reversed([*Path(file).parents][:-1]):
            (folder / parent).mkdir(exist_ok=True)
        torch.save([made.model.state_dict(), made.optimizer.state_dict(), made.data.get_state()], folder / file)

    def load(folder: Path) -> None:
        model, optimizer, data = torch.load(folder / file)
        made.model.load_state_dict(model)
        made.optimizer.load_state_dict(optimizer)
        made.data.set_state(data)

    system.save, system.load = save, load
    return system


def parsing(case: Any, mesh: Any) -> Any:
    """Parses its own options where it is built."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("data", nargs="?" if not case.options.get("needs_data") else None)
    assert parser.parse_args().rate == 0.01
    assert sys.argv == [__file__]
    return plain(case, mesh)


def leaving(case: Any, mesh: Any) -> Any:
    """Ends the process in its first step, as a script's last line may."""
    made = Trainer()

    def step(index: int) -> Tensor:
        made.step(index)
        sys.exit(case.options["status"])

    return made.watched(step)
