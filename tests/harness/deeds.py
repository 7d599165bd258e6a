"""Toys that go wrong in one way, at one moment, on one rank: `tests.harness.deeds:killed_at_its_step_on_0`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitproof.harness.case import Case
from bitproof.reference.parallel.mesh import Mesh
from tests.harness.toy_systems import Toy, hang_here

STEP = 1


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise ValueError("the toy is broken")


def _allocate() -> None:
    torch.empty(1 << 50)


def _fill_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as device:
        device.write(b"x")


def _garble() -> None:
    for fd in range(3, 64):
        try:
            os.write(fd, b"\xff{garbage}\n")
        except OSError:
            continue


def _hold() -> None:
    here = Path(os.environ["TEST_HOLD"])
    here.touch()
    while here.exists():
        time.sleep(0.05)


def _end_host(number: int) -> None:
    os.kill(os.getppid(), number)
    time.sleep(3600)


DEEDS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": _stop,
    "hanging": hang_here,
    "raising": _raise,
    "leaving": lambda: os._exit(0),
    "exiting": lambda: sys.exit(0),
    "out_of_memory": _allocate,
    "disk_full": _fill_disk,
    "garbling": _garble,
}
HOST_DEEDS: dict[str, Callable[[], Any]] = {
    "host_killed": lambda: _end_host(signal.SIGKILL),
    "host_stopped": lambda: _end_host(signal.SIGSTOP),
}
HOLDING: dict[str, Callable[[], Any]] = {"held": _hold}
"""What other machines' tests need: a rank that says that it is there, and goes on when it is let go."""
MOMENTS = ("when_made", "at_its_step", "at_the_last_step", "when_asked_for_its_manifest")


class Wrong(Toy):
    """Does a deed once."""

    def __init__(self, case: Case, mesh: Mesh, deed: Callable[[], Any], moment: str, rank: int) -> None:
        super().__init__(case, mesh)
        self.deed, self.when, self.bad_rank, self.last = deed, moment, rank, case.steps - 1
        self.at("when_made")

    def at(self, moment: str) -> None:
        """Whether this is the moment, and the rank, to do it."""
        if (moment, self.rank) == (self.when, self.bad_rank):
            self.deed()

    def step(self, index: int, observe: Callable[..., None]) -> None:
        if index == STEP:
            self.at("at_its_step")
        super().step(index, observe)
        if index == self.last:
            self.at("at_the_last_step")

    def manifest(self) -> dict[str, Any]:
        self.at("when_asked_for_its_manifest")
        return super().manifest()


def __getattr__(name: str) -> Callable[[Case, Mesh], Wrong]:
    for deed, do in (DEEDS | HOST_DEEDS | HOLDING).items():
        for moment in MOMENTS:
            head, _, rank = name.rpartition("_on_")
            if head == f"{deed}_{moment}":
                return lambda case, mesh: Wrong(case, mesh, do, moment, int(rank))
    raise AttributeError(name)
