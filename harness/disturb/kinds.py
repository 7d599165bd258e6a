"""The faults with fields: a flipped bit; a rank that dies, hangs or raises an error; another order of sums."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from bitproof.harness.errors import UsageError

SUM_ORDERS = ("descending", "pairwise", "position")
FLIPPED = ("grad", "param", "buffer", "optimizer")
"""The kinds of tensors in which a bit can be flipped."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A defect that is injected at a step of a run."""

    kind: ClassVar[str]
    if TYPE_CHECKING:
        step: int  # every fault has it, in a place of its own

    def __str__(self) -> str:
        values = ",".join(f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != "")
        return f"{self.kind}:{values}"

    @property
    def row(self) -> Any:
        """The catalogue's entry, if the fault is given by an entry's name; None for other faults."""
        return None

    def strike(self) -> None:
        """Apply the fault at the start of its step. Does nothing for a fault that changes values: it is applied when
        these are computed."""

    def is_on(self, rank: int) -> bool:
        """Return whether the fault occurs on this rank."""
        return True


@dataclass(frozen=True, kw_only=True)
class RankFault(Fault):
    """A defect on the rank `rank` only."""

    rank: int
    step: int

    def is_on(self, rank: int) -> bool:
        """Return whether the fault occurs on this rank."""
        return rank == self.rank


@dataclass(frozen=True, kw_only=True)
class SumOrder(Fault):
    """Sums over ranks are taken in another order, on all ranks, from step `step` on: see
    `reference.parallel.other_order_group`."""

    kind: ClassVar[str] = "sum-order"
    order: str
    step: int = 0

    def __post_init__(self) -> None:
        if self.order not in SUM_ORDERS:
            raise UsageError("unknown order of sums", expected=", ".join(SUM_ORDERS), found=self.order)


@dataclass(frozen=True, kw_only=True)
class FlipBit(RankFault):
    """A flipped bit of one element of this rank's part of a tensor; bit 0 is the lowest.

    Example: `flip-bit:optimizer=norm.weight.exp_avg,rank=1,step=0`. The tensor has its name in a recording:

    - a gradient is flipped when it has been computed.
    - a parameter, buffer or optimizer state is flipped in place when it is recorded, so later steps read the flipped
      bit. If the system passes a copy to the recording, such as a gathered DTensor, only the record has it.
    """

    kind: ClassVar[str] = "flip-bit"
    grad: str = ""
    param: str = ""
    buffer: str = ""
    optimizer: str = ""
    bit: int = 0
    element: int = 0

    def __post_init__(self) -> None:
        if len(named := [kind for kind in FLIPPED if getattr(self, kind)]) != 1:
            raise UsageError(
                "fault flip-bit takes one tensor",
                expected=" or ".join(f"{kind}=NAME" for kind in FLIPPED),
                found=" and ".join(f"{kind}={getattr(self, kind)}" for kind in named) or "none",
            )

    @property
    def tensor(self) -> tuple[str, str]:
        """The kind and the name of the tensor, such as ("grad", "norm.weight")."""
        return next((kind, name) for kind in FLIPPED if (name := getattr(self, kind)))


@dataclass(frozen=True, kw_only=True)
class KillRank(RankFault):
    """The rank dies by SIGKILL."""

    kind: ClassVar[str] = "kill-rank"

    @property
    def row(self) -> Any:
        """None, since this fault is not in the catalogue of faults."""
        return None

    def strike(self) -> None:
        """Kill this process by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class HangRank(RankFault):
    """The rank stops taking part in the run, but its process stays alive."""

    kind: ClassVar[str] = "hang-rank"

    @property
    def row(self) -> Any:
        """None, since this fault is not in the catalogue of faults."""
        return None

    def strike(self) -> None:
        """Sleep forever."""
        while True:
            time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class Raise(RankFault):
    """The rank raises an error."""

    kind: ClassVar[str] = "raise"

    @property
    def row(self) -> Any:
        """None, since this fault is not in the catalogue of faults."""
        return None

    def strike(self) -> None:
        """Raise an error, as a defect in the system would."""
        raise RuntimeError(f"injected by {self}")


FAULTS: dict[str, type[Fault]] = {fault.kind: fault for fault in (FlipBit, KillRank, HangRank, Raise, SumOrder)}
