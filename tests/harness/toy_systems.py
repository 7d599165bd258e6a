"""Systems that run in milliseconds, each with one way to behave. Named as `tests.harness.toy_systems:steady`."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from bitproof.harness.case import Case
from bitproof.harness.options import Stress
from bitproof.reference.parallel.collectives import all_reduce
from bitproof.reference.parallel.mesh import FSDP, Mesh

BAD_STEP = 2
BAD_RANK = 1


class Toy:
    """A linear model on every rank, whose gradients are summed over ranks. One grad a step has the name `weight`."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self.rank = mesh.rank
        self.world_size = case.parallelism.world_size
        self.weight = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7
        self.moment = torch.zeros_like(self.weight)
        self.gradients: Any = self.plain_gradients

    def wrap_gradients(self, wrap: Callable[[Any], Any]) -> None:
        """Let a fault have the function that computes gradients."""
        self.gradients = wrap(self.gradients)

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss (w . x)^2 and its gradient on this rank."""
        product = (self.weight * x).sum()
        gradients = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(gradients, 2 * product * x)
        return product.square(), {"weight": sum(gradients[1:], gradients[0])}

    def step(self, index: int, observe: Callable[..., None]) -> None:
        """One step of momentum descent."""
        self.misbehave(index)
        loss, gradients = self.gradients(torch.full((2, 3), 0.5 + index + self.rank / 8))
        observe("loss", "loss", loss)
        observe("grad", "weight", gradients["weight"])
        self.moment = self.moment * 0.9 + gradients["weight"]
        self.weight = self.weight - 1e-6 * self.moment
        observe("param", "weight", self.weight)
        observe("optimizer", "weight.moment", self.moment)

    def misbehave(self, index: int) -> None:
        """What sets a toy apart."""

    def manifest(self) -> dict[str, Any]:
        """What this rank read."""
        return {"data_sha256": f"toy{self.rank}"}


def steady(case: Case, mesh: Mesh) -> Toy:
    """The same every time."""
    return Toy(case, mesh)


class Loose(Toy):
    """Undoes two of the switches that keep a run repeatable: one when it is made, one in its last step, on one rank."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh)
        self.last = case.steps - 1
        if self.rank == BAD_RANK:
            torch.use_deterministic_algorithms(False)

    def misbehave(self, index: int) -> None:
        if self.rank == BAD_RANK and index == self.last:
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


class OneBitOff(Toy):
    """Has one other bit in its gradient, on one rank, from one step on."""

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, gradients = super().plain_gradients(x)
        if self.rank == BAD_RANK and x[0, 0] > 0.5 + BAD_STEP:
            gradients["weight"].view(torch.int32)[1, 2] ^= 1
        return loss, gradients


one_bit_off = OneBitOff


class Shy(OneBitOff):
    """As OneBitOff, but fails when its calls are logged."""

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            raise RuntimeError("somebody is looking")
        return super().plain_gradients(x)


shy = Shy


class SlowWhenWatched(OneBitOff):
    """As OneBitOff, but takes its time when its calls are logged."""

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            time.sleep(600)
        return super().plain_gradients(x)


slow_when_watched = SlowWhenWatched


class TenPercentOff(Toy):
    """Has a gradient that is 10 % too large, on one rank, from one step on."""

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, gradients = super().plain_gradients(x)
        if self.rank == BAD_RANK and x[0, 0] > 0.5 + BAD_STEP:
            gradients["weight"] *= 1.1
        return loss, gradients


ten_percent_off = TenPercentOff


class NanOnce(Toy):
    """Reports a NaN among its gradients once; nothing else shows it."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        def observing(kind: str, name: str, tensor: torch.Tensor) -> None:
            if kind == "grad" and index == BAD_STEP and self.rank == BAD_RANK:
                tensor = tensor.clone()
                tensor[0, 0] = float("nan")
            observe(kind, name, tensor)

        super().step(index, observing)


nan_once = NanOnce


class Unseen(Toy):
    """Has a parameter that changes in memory, by no operator, on one rank at one step."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        def observing(kind: str, name: str, tensor: torch.Tensor) -> None:
            if kind == "param" and index == BAD_STEP and self.rank == BAD_RANK:
                tensor.numpy()[0, 0] += 1
            observe(kind, name, tensor)

        super().step(index, observing)


unseen = Unseen


class Secretive(Toy):
    """Computes, at one step on one rank, what steady systems never do and nobody reads."""

    def misbehave(self, index: int) -> None:
        if index == BAD_STEP and self.rank == BAD_RANK:
            self.weight.mul(3.0)


secretive = Secretive


class Noisy(Toy):
    """Never the same twice."""

    def misbehave(self, index: int) -> None:
        self.weight = self.weight + random.SystemRandom().random()


noisy = Noisy


def turn_of(rank: int, name: str) -> int:
    """How often a rank of a toy has run before on this host: every run is another process, so files count."""
    for turn in itertools.count():
        with contextlib.suppress(FileExistsError):
            Path(tempfile.gettempdir(), f"{name}.{rank}.{turn}").touch(exist_ok=False)
            return turn
    raise AssertionError


class NoisyOnOneRank(Toy):
    """Carries noise along where nobody sees it, from one step of one rank on; it reaches the weight a step later."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        if self.rank == BAD_RANK and index == BAD_STEP:
            self.weight = self.weight + self.hidden
        super().step(index, observe)
        if self.rank == BAD_RANK and index == BAD_STEP - 1:
            self.hidden = self.weight * random.SystemRandom().random()


noisy_on_one_rank = NoisyOnOneRank


class NoisyOnce(Toy):
    """Differs the second time that it runs, and never again."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh)
        self.second = turn_of(mesh.rank, "noisy_once") == 1

    def misbehave(self, index: int) -> None:
        if self.second and self.rank == BAD_RANK and index == BAD_STEP:
            self.weight = self.weight + 1


noisy_once = NoisyOnce


class OfTwoMinds(Toy):
    """Does something else when it runs a second time. Its class says what, to what it observes."""

    kinds: tuple[str, ...] = ()

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh)
        self.second = turn_of(mesh.rank, type(self).__name__) == 1

    def step(self, index: int, observe: Callable[..., None]) -> None:
        def observing(kind: str, name: str, tensor: torch.Tensor) -> None:
            if not (self.second and kind in self.kinds and (index, self.rank) == (BAD_STEP, BAD_RANK)):
                observe(kind, name, tensor)

        super().step(index, observing)


class Forgetful(OfTwoMinds):
    """Observes one optimizer state less."""

    kinds = ("optimizer",)


class Talkative(OfTwoMinds):
    """Observes one buffer more."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        super().step(index, observe)
        if self.second:
            observe("buffer", "more", self.weight)


class Weary(OfTwoMinds):
    """Raises."""

    def misbehave(self, index: int) -> None:
        if self.second and (index, self.rank) == (BAD_STEP, BAD_RANK):
            raise ValueError("once was enough")


forgetful, talkative, weary = Forgetful, Talkative, Weary


class ReadsFreshMemory(Toy):
    """Adds what nobody wrote to its weight, on one rank at one step."""

    def misbehave(self, index: int) -> None:
        if self.rank == BAD_RANK and index == BAD_STEP:
            self.weight = self.weight + torch.empty(2, 3)


reads_fresh_memory = ReadsFreshMemory


class Deaf(Toy):
    """Raises on one rank, and the others never hear of it, as where a host waits for a device that waits for a peer."""

    def misbehave(self, index: int) -> None:
        if index == BAD_STEP:
            if self.rank == BAD_RANK:
                raise ValueError("nobody hears")
            time.sleep(3600)


deaf = Deaf


SLEEPY = Stress(num_threads=2, longest_sleep=0.02)
"""What makes `Racing` lose its race."""


class Racing(Toy):
    """One rank reads after many naps what another has written by then, unless its many collectives took longer.

    A collective takes 0.02 ms, and on average 10 ms more under `SLEEPY` stress: 2 ms of collectives against 300 ms of
    naps in a plain run, 1,000 ms against 300 under stress, so that a busy machine changes neither order.
    """

    NUM_TURNS = 100
    NAP = 0.003

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh)
        self.alone = dist.new_group([1 - BAD_RANK])
        # All ranks of one run find the same file, and no other run does.
        self.board = Path(tempfile.gettempdir(), f"board.{turn_of(mesh.rank, 'racing')}")

    def misbehave(self, index: int) -> None:
        if index != BAD_STEP:
            return
        dist.barrier()
        if self.rank != BAD_RANK:
            for _ in range(self.NUM_TURNS):
                dist.all_reduce(torch.ones(1), group=self.alone)
            self.board.touch()
        else:
            for _ in range(self.NUM_TURNS):
                time.sleep(self.NAP)
            self.weight = self.weight + float(not self.board.exists())


racing = Racing


class Misbehaving(Toy):
    """Does `deed` on one rank at one step."""

    def misbehave(self, index: int) -> None:
        if self.rank == BAD_RANK and index == BAD_STEP:
            self.deed()

    def deed(self) -> None:
        """What it does."""


class Raising(Misbehaving):
    def deed(self) -> None:
        raise ValueError("the toy is broken")


class Killed(Misbehaving):
    def deed(self) -> None:
        print("a last word", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Leaving(Misbehaving):
    def deed(self) -> None:
        os._exit(0)


class Garbling(Misbehaving):
    """Writes into every descriptor that it finds."""

    def deed(self) -> None:
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, b"\xff{garbage}\n")


class Tampering(Misbehaving):
    """Removes what another system recorded."""

    def deed(self) -> None:
        for file in Path(os.environ["TOY_VICTIM"]).iterdir():
            file.unlink(missing_ok=True)


class Escaping(Misbehaving):
    """Starts what leaves its process group and its session."""

    def deed(self) -> None:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)


class Escaped(Escaping):
    """Hangs after that."""

    def deed(self) -> None:
        super().deed()
        hang_here()


class Hanging(Misbehaving):
    def deed(self) -> None:
        hang_here()


def hang_here() -> None:
    """A name to find in a stack."""
    time.sleep(3600)


class HostKiller(Misbehaving):
    def deed(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)


class Spawning(Misbehaving):
    """Leaves a child of its own behind."""

    def deed(self) -> None:
        if os.fork() == 0:
            time.sleep(3600)


class Slow(Toy):
    """Takes its time."""

    def misbehave(self, index: int) -> None:
        if index == BAD_STEP:
            time.sleep(8.0)


slow = Slow
raising, killed, leaving, hanging, host_killer, spawning = Raising, Killed, Leaving, Hanging, HostKiller, Spawning
garbling, tampering, escaping, escaped = Garbling, Tampering, Escaping, Escaped


class Meeting(Toy):
    """Sums its gradients through a group that bitproof names, wherever the ranks of that meet."""

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        product = (self.weight * x).sum()
        return product.square(), {"weight": all_reduce(2 * product * x, FSDP)}


class MeetingKilled(Meeting, Killed):
    """Is killed while others wait for it there."""


class MeetingHanging(Meeting, Hanging):
    """Hangs while others wait for it there."""


meeting, meeting_killed, meeting_hanging = Meeting, MeetingKilled, MeetingHanging


class Lossless(Toy):
    """Observes nothing at all."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        return None


lossless = Lossless


class OtherShape(Toy):
    """Reports its weight flat: the same bytes under another shape."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        super().step(index, lambda kind, name, t: observe(kind, name, t.reshape(-1) if kind == "param" else t))


other_shape = OtherShape


class Yielding:
    """A toy that yields under names of its own, and lets nobody wrap its gradients."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self.toy = Toy(case, mesh)

    def step(self, index: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """One step of momentum descent."""
        toy = self.toy
        loss, gradients = toy.plain_gradients(torch.full((2, 3), 0.5 + index + toy.rank / 8))
        yield "loss", "loss", loss
        gradient = gradients["weight"]
        yield "grad", "model.weight", gradient
        toy.moment = toy.moment * 0.9 + gradient
        gradient.zero_()  # what was yielded has been read
        toy.weight = toy.weight - 1e-6 * toy.moment
        yield "param", "model.weight", toy.weight
        yield "optimizer", "model.weight.moment", toy.moment


stranger = Yielding


class Named(Yielding):
    """As Yielding, and declares its names."""

    names: ClassVar = {"model.*": "*"}


named = Named


class Stale(Yielding):
    """Declares names of which one is gone, and one is seen on one rank alone."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh)
        self.names = {"model.*": "*", "gone": "away", "loss" if mesh.rank else "other": "loss"}


stale = Stale


def skipping(case: Case, mesh: Mesh) -> Callable[[int], list[Any]]:
    """Yields nothing at one step on one rank."""
    steps = Named(case, mesh)
    return lambda index: [] if (index, mesh.rank) == (BAD_STEP, BAD_RANK) else steps.step(index)


class Freeing(Toy):
    """Frees the storage of what it has shown, as FSDP2 does with gathered parameters."""

    def step(self, index: int, observe: Callable[..., None]) -> None:
        """One step, with a gathered weight that is freed."""
        super().step(index, observe)
        gathered = self.weight.clone()
        observe("buffer", "gathered@after_optimizer", gathered)
        gathered.untyped_storage().resize_(0)


freeing = Freeing


class Shown(Toy):
    """Takes its activations to host memory and back in a graph of its own, which it shows; `waits` for each."""

    waits = True

    def __init__(self, case: Case, mesh: Mesh) -> None:
        super().__init__(case, mesh)
        import bitproof.harness.graph.offload_operators  # noqa: F401 (it registers them)

        copies = torch.ops.bitproof

        def step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            product = weight * x
            back = copies.reload(copies.wait_offload(copies.offload(product), product), "cpu")
            back = copies.wait_reload(back) if self.waits else back
            return back.sum()

        self.graph = torch.fx.symbolic_trace(step)

    def plain_gradients(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The same, by the graph."""
        loss, gradients = super().plain_gradients(x)
        return self.graph(self.weight, x).square() + loss * 0, gradients


class ShownRacing(Shown):
    """Reads what comes back before it is there."""

    waits = False


def shown(case: Case, mesh: Mesh) -> Shown:
    """A system that shows a graph in which every copy is waited for."""
    return Shown(case, mesh)


def shown_racing(case: Case, mesh: Mesh) -> Shown:
    """A system that shows a graph which reads a copy before its wait."""
    return ShownRacing(case, mesh)
