"""Trainers that lose a refusal of ours, each in another way. They train the wrong steps only after it.

All take one optimizer step too many. Alone, each trains on with two; within a run our hook refuses the second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bitproof


def suppressed(refuses: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        refuses()


def caught_base(refuses: Callable[[], Any]) -> None:
    try:
        refuses()
    except BaseException as error:
        print("going on:", error)


def returned_in_finally(refuses: Callable[[], Any]) -> None:
    def step() -> int:
        try:
            refuses()
        finally:
            return 1  # noqa: B012

    step()


def in_a_generator(refuses: Callable[[], Any]) -> None:
    def steps() -> Any:
        while True:
            try:
                yield refuses()
            except:  # noqa: E722
                return

    list(steps())


def in_a_thread(refuses: Callable[[], Any]) -> None:
    threading.excepthook = lambda args: None
    thread = threading.Thread(target=refuses)
    thread.start()
    thread.join()


def in_an_autograd_hook(refuses: Callable[[], Any]) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: refuses() and None)
    with contextlib.suppress(Exception):
        x.sum().backward()


def translated(refuses: Callable[[], Any]) -> None:
    try:
        refuses()
    except Exception:
        raise KeyboardInterrupt from None


def left_by_exit(refuses: Callable[[], Any]) -> None:
    try:
        refuses()
    finally:
        os._exit(0)


def left_by_sys_exit(refuses: Callable[[], Any]) -> None:
    try:
        refuses()
    except Exception:
        sys.exit(0)


def never_ending(refuses: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        refuses()
    time.sleep(1e6)


def forked(refuses: Callable[[], Any]) -> None:
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            refuses()
        os._exit(0)
    os.waitpid(pid, 0)


WAYS = {
    way.__name__: way
    for way in (
        suppressed,
        caught_base,
        returned_in_finally,
        in_a_generator,
        in_a_thread,
        in_an_autograd_hook,
        translated,
        left_by_exit,
        left_by_sys_exit,
        never_ending,
        forked,
    )
}


class Trainer:
    """A model of two layers, each with an optimizer of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)))
        layers = self.model.module
        self.optimizers = [torch.optim.AdamW(layers[place].parameters(), lr=0.01) for place in (0, 2)]
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def backward(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(2, 4, generator=self.data)).square().mean()
        loss.backward()
        return loss

    def step(self, index: int) -> Tensor:
        loss = self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.again()
        self.model.zero_grad()
        return loss

    def loop(self) -> None:
        for index in range(100):
            self.step(index)

    def in_turns(self) -> None:
        """The first optimizer steps twice before the other does."""
        for _ in range(100):
            self.backward()
            self.optimizers[0].step()
            self.again()
            self.optimizers[1].step()
            self.model.zero_grad()

    def again(self) -> None:
        """One step too many, in a trainer that takes it."""


def plain() -> Any:
    made = Trainer()
    return bitproof.watch(made.step, model=made.model, optimizer=made.optimizers)


def plain_loop() -> Any:
    made = Trainer()
    return bitproof.watch(train=made.loop, model=made.model, optimizer=made.optimizers)


def twice(case: Any, mesh: Any) -> Any:
    """The same trainer, which takes a second step of its first optimizer in the way that the case says."""
    made = Trainer()
    way = WAYS[case.options["way"]]
    if mesh.rank == 1:
        made.again = lambda: way(made.optimizers[0].step)  # type: ignore[method-assign]
    if case.options.get("loop"):
        return bitproof.watch(train=made.in_turns, model=made.model, optimizer=made.optimizers)
    return bitproof.watch(made.step, model=made.model, optimizer=made.optimizers)


def shows_twice(case: Any, mesh: Any) -> Any:
    """Shows a parameter twice, the second time another value, and swallows what we say of that."""
    made = plain()

    def step(index: int, observe: Any) -> None:
        made.step(index, observe)
        WAYS[case.options["way"]](lambda: observe("param", "0.weight", torch.zeros(4)))

    return step


def watches_nothing(case: Any, mesh: Any) -> Any:
    """Falls back to another optimizer when `watch` refuses its own."""
    made = Trainer()
    WAYS[case.options["way"]](lambda: bitproof.watch(made.step, model=made.model, optimizer="AdamW"))
    return bitproof.watch(made.step, model=made.model, optimizer=made.optimizers)


def unlike_sums(case: Any, mesh: Any) -> Any:
    """Asks a group of ours for the largest number, which it has no order for, and goes on without it."""
    from bitproof.reference.parallel.mesh import joined_groups

    made = Trainer()
    numbers = torch.ones(2)
    WAYS[case.options["way"]](lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=joined_groups["fsdp"]))
    return bitproof.watch(made.step, model=made.model, optimizer=made.optimizers)


def loses_their_own(case: Any, mesh: Any) -> Any:
    """Swallows an exception of its own, raised inside of an optimizer's step: that is its own affair."""
    made = Trainer()

    def closure() -> Tensor:
        raise ValueError("no loss today")

    made.again = lambda: suppressed(lambda: made.optimizers[0].step(closure))  # type: ignore[method-assign]
    return bitproof.watch(made.step, model=made.model, optimizer=made.optimizers)
