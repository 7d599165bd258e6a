"""The kinds of faults that take settings, such as `flip-bit:rank=1,step=0,grad=norm.weight`.

A fault is a deliberate defect: it checks that bitproof detects such defects.
"""

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
    """A deliberate defect, injected into a run at step `step`."""

    kind: ClassVar[str]
    if TYPE_CHECKING:
        step: int  # every fault has it, in a place of its own

    def __str__(self) -> str:
        values = ",".join(f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != "")
        return f"{self.kind}:{values}"

    @property
    def row(self) -> Any:
        """Return the catalogue's entry that the user named, such as `no-weight-decay`; None for other faults."""
        return None

    def strike(self) -> None:
        """Kill this process, hang, or raise an error, at the start of the fault's step.

        A fault that changes values does nothing here: it is applied when the values are computed.
        """

    def is_on(self, rank: int) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class RankFault(Fault):
    """A fault on a single rank."""

    rank: int
    step: int

    def is_on(self, rank: int) -> bool:
        return rank == self.rank


@dataclass(frozen=True, kw_only=True)
class SumOrder(Fault):
    """A fault that adds the ranks' values in another order than rank order, on all ranks, from step `step` on.

    `order` is one of `SUM_ORDERS`. The code that adds is `reference.parallel.other_order_group`.
    """

    kind: ClassVar[str] = "sum-order"
    order: str
    step: int = 0

    def __post_init__(self) -> None:
        if self.order not in SUM_ORDERS:
            raise UsageError("unknown order of sums", expected=", ".join(SUM_ORDERS), found=self.order)


@dataclass(frozen=True, kw_only=True)
class FlipBit(RankFault):
    """A fault that flips one bit of a tensor on one rank.

    Example: `flip-bit:optimizer=norm.weight.exp_avg,rank=1,step=0`.

    - `grad`, `param`, `buffer`, `optimizer`: the tensor's name in a recording. Exactly one of the four is given.
    - `element`: an index into the rank's part of the tensor, flattened.
    - `bit`: the bit of that element; 0 is the lowest.

    A gradient is flipped when it has been computed. A parameter, buffer or optimizer state is flipped in place when it
    is recorded, so later steps read the flipped bit. If the system records a copy, such as a gathered DTensor, only
    that copy is flipped.
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
        """Return the kind and the name of the tensor, such as ("grad", "norm.weight")."""
        return next((kind, name) for kind in FLIPPED if (name := getattr(self, kind)))


@dataclass(frozen=True, kw_only=True)
class KillRank(RankFault):
    """A fault that kills the rank with SIGKILL."""

    kind: ClassVar[str] = "kill-rank"

    @property
    def row(self) -> Any:
        return None

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class HangRank(RankFault):
    """A fault that makes the rank sleep forever. Its process stays alive."""

    kind: ClassVar[str] = "hang-rank"

    @property
    def row(self) -> Any:
        return None

    def strike(self) -> None:
        while True:
            time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class Raise(RankFault):
    """A fault that raises an error on the rank, as a defect in the system would."""

    kind: ClassVar[str] = "raise"

    @property
    def row(self) -> Any:
        return None

    def strike(self) -> None:
        raise RuntimeError(f"injected by {self}")


FAULTS: dict[str, type[Fault]] = {fault.kind: fault for fault in (FlipBit, KillRank, HangRank, Raise, SumOrder)}
