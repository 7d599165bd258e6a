"""Injects a fault on a rank while the rank takes its steps, and checks that the fault fired."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.entry import Entry, Named
from bitproof.harness.disturb.faults.clock import NOW
from bitproof.harness.disturb.injection import Injection
from bitproof.harness.disturb.kinds import Fault, FlipBit, SumOrder
from bitproof.harness.errors import UsageError
from bitproof.harness.within_user_code import refusing, theirs

if TYPE_CHECKING:
    import torch

    from bitproof.harness.disturb.injection import GradientFunction, Gradients, Observe

WORDS = {"grad": "gradient", "param": "parameter", "buffer": "buffer", "optimizer": "state of an optimizer"}


class Injector(Injection):
    """Applies a fault on a running rank, and records whether it was applied."""

    def __init__(self, fault: Fault | None, rank: int, world_size: int = 1) -> None:
        self.fault = fault if fault is not None and fault.is_on(rank) else None
        self.entry: Entry | None = fault.row if isinstance(fault, Named) else None
        # A fault that this rank cannot see must not count as missing here.
        self.fired = self.entry is not None and self._is_silent_here(rank, world_size)
        self._shown: list[str] = []
        self._wraps = False
        self._turns: Any = None
        # Kernels inserted into a graph get no injector, so they read the rank and the step from this global clock.
        NOW.rank, NOW.world_size, NOW.step = rank, world_size, -1
        NOW.memory.clear()

    def _is_silent_here(self, rank: int, world_size: int) -> bool:
        assert self.entry is not None
        # An edit is part of the graph. Other faults may be on another rank only.
        return self.entry.edit is not None or self.entry.rank_of(world_size) not in (None, rank)

    @property
    def sum_order(self) -> str | None:
        if isinstance(self.fault, SumOrder):
            return self.fault.order
        return self.entry.order if self.entry else None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if self.entry is None or self.entry.call is None:
            yield
            return
        from bitproof.harness.disturb.tamper import tampered

        with tampered(self.entry, NOW, self.fire) as self._turns:
            yield

    def hide_from_fault(self, observe: Observe) -> Observe:
        if self.entry is None or self.entry.call is None:
            return observe
        from bitproof.harness.disturb.tamper import untampered

        return untampered(observe)

    def begin_step(self, step: int) -> None:
        self.step = NOW.step = step
        # A fault counts the calls of its operators from the beginning of each step.
        if self._turns is not None:
            self._turns.clear()
        # These faults wait for a tensor, a sum or a call of the step.
        waits = isinstance(self.fault, (FlipBit, SumOrder, Named))
        if self.fault is not None and self.fault.step == step and not waits:
            self.fired = True
            self.fault.strike()

    def strike_runner(self, step: Any) -> None:
        if self.entry is not None and self.entry.runner is not None:
            self.entry.runner(step)
            self.fired = True

    def fire(self) -> None:
        self.fired = True

    def wrap(self, function: GradientFunction) -> GradientFunction:
        self._wraps = True

        @refusing()
        def faulty(inputs: Any) -> Gradients:
            loss, gradients = theirs(function, inputs)
            if isinstance(self.fault, FlipBit) and self.fault.grad and self.fault.step == self.step:
                # A new dict, so that the function's own dict stays right.
                gradients = gradients | {self.fault.grad: flip_bit(self.fault, gradients)}
                self.fired = True
            return loss, gradients

        return faulty

    def flipping(self, observe: Observe) -> Observe:
        fault = self.fault
        if not isinstance(fault, FlipBit):
            return observe

        def flip(kind: str, name: str, tensor: torch.Tensor) -> None:
            # A gradient is flipped here only if the function that computes it cannot be wrapped.
            if fault.step == self.step and kind == fault.tensor[0] and not (kind == "grad" and self._wraps):
                # For an error that lists the tensors of the right kind.
                self._shown.append(name)
                if name == fault.tensor[1]:
                    from bitproof.harness.capture.digest import plain

                    with refusing():
                        local = plain(tensor)
                        local.copy_(flip_bit(fault, {name: local}))
                    self.fired = True
            observe(kind, name, tensor)

        return flip

    def check_fired(self) -> None:
        # A fault of a later step may still fire.
        if self.fault is None or self.fault.step > self.step or self.fired:
            return
        if self.entry is not None and self.entry.call is not None:
            raise UsageError(
                f"fault {self.fault} never fired",
                expected=f"a system that calls {' or '.join(self.entry.operators)} as the fault has it",
                fix="choose another case or fault: see `bitproof faults --list`",
            )
        if self.sum_order is not None:
            raise UsageError(
                f"fault {self.fault} never fired",
                expected="a system that adds floating-point numbers of three ranks or more, over the mesh's groups",
                fix="choose a case with more ranks; a system that makes its own process groups adds as those do",
            )
        if isinstance(self.fault, FlipBit) and (self._shown or not self.fault.grad):
            raise _no_such_tensor(self.fault, self._shown)
        raise UsageError(
            f"fault {self.fault} never fired",
            expected="a system whose gradient function the fault can wrap",
            fix="give the system a method wrap_gradients(wrap) that wraps the function that computes its gradients",
        )


def flip_bit(fault: FlipBit, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a copy of the tensor that the fault names, with one bit flipped.

    Raises UsageError if there is no such tensor, element or bit.
    """
    import torch

    kind, name = fault.tensor
    if name not in tensors:
        raise _no_such_tensor(fault, list(tensors))
    tensor = tensors[name].detach().clone(memory_format=torch.contiguous_format)
    bits = tensor.element_size() * 8
    if fault.element >= tensor.numel() or fault.bit >= bits:
        raise UsageError(
            f"fault {fault} lies outside the {WORDS[kind]}",
            expected=f"element in 0..{tensor.numel() - 1} and bit in 0..{bits - 1}",
            found=f"element={fault.element}, bit={fault.bit}",
        )
    # Little-endian: byte b of an element holds its bits 8b to 8b + 7.
    octets = tensor.view(-1).view(torch.uint8)
    octets[fault.element * tensor.element_size() + fault.bit // 8] ^= 1 << (fault.bit % 8)
    return tensor


def _no_such_tensor(fault: FlipBit, names: list[str]) -> UsageError:
    kind, name = fault.tensor
    close = difflib.get_close_matches(name, names, n=3) or names[:3]
    expected = f"a {WORDS[kind]} such as {', '.join(close)}" if close else f"a system that records a {WORDS[kind]}"
    return UsageError(f"fault {fault} names no {WORDS[kind]}", expected=expected, found=name)
