"""What a rank asks of a fault while it takes its steps; without a fault each answer changes nothing."""

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
    """A rank without a fault. `disturb.faults.Injector` is a rank with one: no other rank loads the faults."""

    fault: Fault | None = None
    step: int = -1

    @property
    def sum_order(self) -> str | None:
        """The order of sums over ranks; None for the normal order."""
        return None

    def at_work(self) -> AbstractContextManager[None]:
        """Context in which the system takes its steps."""
        return nullcontext()

    def unseen(self, observe: Observe) -> Observe:
        """Wrap `observe`: a fault of calls does not affect the calls that recording makes."""
        return observe

    def begin_step(self, step: int) -> None:
        """Apply the fault if this is its step; a fault of values waits for the gradients."""
        self.step = step

    def strike_runner(self, step: Any) -> None:
        """Let a runner fault change the runner of a staged step."""

    def fire(self) -> None:
        """Note that the fault fired, called by the code that applies it."""

    def wrap(self, function: GradientFunction) -> GradientFunction:
        """Wrap a function that computes gradients: the result has the flipped bit."""
        return function

    def flipping(self, observe: Observe) -> Observe:
        """Wrap `observe`: it flips the bit in place in the named tensor, and then records the tensor."""
        return observe

    def check_fired(self) -> None:
        """Raise UsageError if the fault should have fired by now but did not."""
