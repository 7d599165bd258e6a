"""Hooks through which a fault acts on a running rank. Without a fault they change nothing."""

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

    A rank with a fault gets an instance of the subclass `disturb.faults.Injector`. Other ranks never load that module.
    """

    fault: Fault | None = None
    step: int = -1

    @property
    def sum_order(self) -> str | None:
        """Return the order in which the ranks' values are added, such as "descending"; None for rank order."""
        return None

    def at_work(self) -> AbstractContextManager[None]:
        """Context for the steps of the system: within it, a fault that replaces operator calls is active."""
        return nullcontext()

    def hide_from_fault(self, observe: Observe) -> Observe:
        """Wrap an observer of the system, so that no fault replaces the operator calls of the observer itself."""
        return observe

    def begin_step(self, step: int) -> None:
        """Set the current step. A fault that kills, hangs or raises is applied now if this is its step."""
        self.step = step

    def strike_runner(self, step: Any) -> None:
        """Apply a fault that changes `step`, the object that runs a step with micro-batches, or a built-in loop."""

    def fire(self) -> None:
        """Record that the fault was applied. The code that applies the fault calls this."""

    def wrap(self, function: GradientFunction) -> GradientFunction:
        """Wrap a function that computes gradients, so that the fault's bit is flipped in its result."""
        return function

    def flipping(self, observe: Observe) -> Observe:
        """Wrap an observer, so that the fault's bit is flipped in place in the named tensor before the observer sees
        it."""
        return observe

    def check_fired(self) -> None:
        """Raise UsageError if the fault's step has begun, but the fault was not applied."""
