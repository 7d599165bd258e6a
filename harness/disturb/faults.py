"""Deliberate defects, put into the candidate to see whether they are caught.

A fault is written `kind:field=value,field=value`. One that never fires is an error: a run that was
to be broken and was not proves nothing.
"""

from __future__ import annotations

import difflib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from harness.case import Case
from harness.errors import UsageError

if TYPE_CHECKING:
    import torch

    Gradients = tuple[torch.Tensor, dict[str, torch.Tensor]]
    GradientFunction = Callable[[Any], Gradients]
    Wrap = Callable[[GradientFunction], GradientFunction]


SUM_ORDERS = ("descending", "pairwise", "position")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A defect at one step."""

    kind: ClassVar[str]
    if TYPE_CHECKING:
        step: int  # every fault has it, in a place of its own

    def __str__(self) -> str:
        values = ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{self.kind}:{values}"

    def strike(self) -> None:
        """What the fault does at the start of its step; a fault of values does nothing here."""

    def is_on(self, rank: int) -> bool:
        """Whether the fault is a rank's."""
        return True


@dataclass(frozen=True, kw_only=True)
class RankFault(Fault):
    """A defect on one rank."""

    rank: int
    step: int

    def is_on(self, rank: int) -> bool:
        """Whether the fault is a rank's."""
        return rank == self.rank


@dataclass(frozen=True, kw_only=True)
class SumOrder(Fault):
    """Sums over ranks are taken in another order, on all ranks, from the step on: see `reference.parallel`."""

    kind: ClassVar[str] = "sum-order"
    order: str
    step: int = 0

    def __post_init__(self) -> None:
        if self.order not in SUM_ORDERS:
            raise UsageError("unknown order of sums", expected=", ".join(SUM_ORDERS), found=self.order)


@dataclass(frozen=True, kw_only=True)
class FlipBit(RankFault):
    """One bit of one element of a local gradient, counted from its lowest."""

    kind: ClassVar[str] = "flip-bit"
    grad: str
    bit: int = 0
    element: int = 0


@dataclass(frozen=True, kw_only=True)
class KillRank(RankFault):
    """The rank dies by SIGKILL."""

    kind: ClassVar[str] = "kill-rank"

    def strike(self) -> None:
        """Die as if killed from outside."""
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class HangRank(RankFault):
    """The rank stops taking part, and lives."""

    kind: ClassVar[str] = "hang-rank"

    def strike(self) -> None:
        """Never come back."""
        while True:
            time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class Raise(RankFault):
    """The rank raises."""

    kind: ClassVar[str] = "raise"

    def strike(self) -> None:
        """Fail as a defect in the system would."""
        raise RuntimeError(f"injected by {self}")


FAULTS: dict[str, type[Fault]] = {fault.kind: fault for fault in (FlipBit, KillRank, HangRank, Raise, SumOrder)}


def known_faults() -> str:
    """Every fault with its fields, optional ones in brackets."""
    return "; ".join(f"{kind}:{_syntax(fault)}" for kind, fault in FAULTS.items())


def parse_fault(text: str) -> Fault:
    """Read `kind:field=value,...`. Raises UsageError for an unknown kind or field, or a value of the wrong type."""
    kind, _, rest = text.partition(":")
    if kind not in FAULTS:
        raise UsageError(f"unknown fault {kind!r}", expected=known_faults())
    fault = FAULTS[kind]
    types = {f.name: f.type for f in fields(fault)}
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        if name not in types or not equals or not value or name in values:
            raise UsageError(f"fault {kind} does not understand {item!r}", expected=f"{kind}:{_syntax(fault)}")
        values[name] = value if types[name] == "str" else _natural(kind, item, value)
    if missing := [name for name in _required(fault) if name not in values]:
        raise UsageError(
            f"fault {kind} lacks {', '.join(missing)}", expected=f"{kind}:{_syntax(fault)}", found=repr(text)
        )
    return fault(**values)


def check_fault(fault: Fault, case: Case) -> None:
    """Refuse a fault that this case can never reach. Raises UsageError."""
    if fault.step >= case.steps:
        raise UsageError(
            f"fault {fault} never fires in case {case.name}",
            expected=f"step in 0..{case.steps - 1}",
            found=f"step={fault.step}",
        )
    world_size = case.parallelism.world_size
    if isinstance(fault, RankFault) and fault.rank >= world_size:
        raise UsageError(
            f"fault {fault} never fires in case {case.name}",
            expected=f"rank in 0..{world_size - 1}",
            found=f"rank={fault.rank}",
        )


class Injector:
    """Applies a fault on one rank, and knows whether it fired."""

    def __init__(self, fault: Fault | None, rank: int) -> None:
        self.fault = fault if fault is not None and fault.is_on(rank) else None
        self.step = -1
        self.fired = False
        self._shown: list[str] = []

    def begin_step(self, step: int) -> None:
        """Strike when this is the step; a fault of values waits for the gradients."""
        self.step = step
        if self.fault is not None and self.fault.step == step and not isinstance(self.fault, (FlipBit, SumOrder)):
            self.fired = True
            self.fault.strike()

    def fire(self) -> None:
        """Know that the fault fired, of one that strikes elsewhere than here."""
        self.fired = True

    def wrap(self, function: GradientFunction) -> GradientFunction:
        """The same function, but for the flipped bit."""

        def faulty(inputs: Any) -> Gradients:
            loss, gradients = function(inputs)
            if isinstance(self.fault, FlipBit) and self.fault.step == self.step:
                gradients = gradients | {self.fault.grad: flip_bit(self.fault, gradients)}
                self.fired = True
            return loss, gradients

        return faulty

    def tamper(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Flip the bit in the named gradient itself as a system shows it, for one whose function cannot be wrapped."""
        if not isinstance(self.fault, FlipBit) or self.fault.step != self.step or kind != "grad":
            return
        self._shown.append(name)
        if name == self.fault.grad:
            from harness.capture.digest import plain

            local = plain(tensor)
            local.copy_(flip_bit(self.fault, {name: local}))
            self.fired = True

    def ignore(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Leave what a system shows as it is: its gradient function was wrapped."""

    def check_fired(self) -> None:
        """Raise UsageError when the fault should have fired by now and did not."""
        if self.fault is not None and self.fault.step <= self.step and not self.fired:
            if isinstance(self.fault, SumOrder):
                raise UsageError(
                    f"fault {self.fault} never fired",
                    expected="a system that adds floating-point numbers of three ranks or more, over the mesh's groups",
                    fix="choose a case with more ranks; a system that makes its own process groups adds as those do",
                )
            if isinstance(self.fault, FlipBit) and self._shown:
                raise _no_such_gradient(self.fault, self._shown)
            raise UsageError(
                f"fault {self.fault} never fired",
                expected="a system whose gradient function the fault can wrap",
                fix="give the system a method wrap_gradients(wrap) that wraps the function that computes its gradients",
            )


def flip_bit(fault: FlipBit, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """A copy of the named gradient with one bit flipped. Raises UsageError when there is no such bit."""
    import torch

    if fault.grad not in gradients:
        raise _no_such_gradient(fault, list(gradients))
    gradient = gradients[fault.grad].detach().clone(memory_format=torch.contiguous_format)
    bits = gradient.element_size() * 8
    if fault.element >= gradient.numel() or fault.bit >= bits:
        raise UsageError(
            f"fault {fault} lies outside the gradient",
            expected=f"element in 0..{gradient.numel() - 1} and bit in 0..{bits - 1}",
            found=f"element={fault.element}, bit={fault.bit}",
        )
    # Little-endian: byte b of an element holds its bits 8b to 8b + 7.
    octets = gradient.view(-1).view(torch.uint8)
    octets[fault.element * gradient.element_size() + fault.bit // 8] ^= 1 << (fault.bit % 8)
    return gradient


def _no_such_gradient(fault: FlipBit, names: list[str]) -> UsageError:
    close = difflib.get_close_matches(fault.grad, names, n=3) or names[:3]
    return UsageError(
        f"fault {fault} names no gradient", expected=f"a gradient such as {', '.join(close)}", found=fault.grad
    )


def _natural(kind: str, item: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise UsageError(f"fault {kind} does not understand {item!r}", expected="an integer of 0 or more")
    return int(value)


def _required(fault: type[Fault]) -> list[str]:
    return [f.name for f in fields(fault) if f.default is f.default_factory]


def _syntax(fault: type[Fault]) -> str:
    required = _required(fault)
    written = {"str": "NAME", "int": "N"}
    return ",".join(
        f"{f.name}={written[str(f.type)]}" if f.name in required else f"[{f.name}={f.default}]" for f in fields(fault)
    )
