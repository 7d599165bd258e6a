"""The hooks that let a fault act on a rank while the rank takes its steps. Without a fault they change nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from bitproof.harness.disturb.kinds import Fault

    Gradients = tuple[torch.Tensor | None, dict[str, torch.Tensor]]
    GradientFunction = Callable[[Any], Gradients]
    Observe = Callable[..., None]


class Injection:
    """The hooks of a rank without a fault: they do nothing.

    A rank with a fault has the subclass `disturb.faults.Injector`. Other ranks never load the faults.
    """

    fault: Fault | None = None
    step: int = -1

    @property
    def sum_order(self) -> str | None:
        """The order of sums over ranks, such as "descending"; None for rank order."""
        return None

    def at_work(self) -> AbstractContextManager[None]:
        """Context around the steps of the system. In it, a fault that replaces operator calls is active."""
        return nullcontext()

    def unseen(self, observe: Observe) -> Observe:
        """Return a function that calls `observe` with the fault switched off: a fault replaces only operator calls of
        the system itself, not those of its observer."""
        return observe

    def begin_step(self, step: int) -> None:
        """Set the current step, and apply a fault that kills, hangs or raises if this is its step."""
        self.step = step

    def strike_runner(self, step: Any) -> None:
        """Apply a fault that changes the runner of a staged step or a built-in loop; `step` is the runner."""

    def fire(self) -> None:
        """Record that the fault fired. The code that applies the fault calls this."""

    def wrap(self, function: GradientFunction) -> GradientFunction:
        """Return a function that computes gradients by `function` and then flips the fault's bit in the result."""
        return function

    def flipping(self, observe: Observe) -> Observe:
        """Return a function that flips the fault's bit in place in the named tensor, and then calls `observe`."""
        return observe

    def check_fired(self) -> None:
        """Raise UsageError if the fault's step has begun, but the fault has not fired."""
