"""A simple `watch` for files that run without bitproof; such a file contains this module as its package `bitproof`.

`watch` records gradients when an optimizer's `step` begins, then parameters, buffers and the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Keep = Callable[[str, str, Tensor], None]


class LastStep(BaseException):
    """Raised inside a training loop to stop it after the last step of the case."""


def watch(
    step: Callable[[int], Any] | None = None,
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    train: Callable[[], Any] | None = None,
    names: Any = None,
    **others: Any,
) -> SimpleStep:
    """Make a system from a function that trains one step, `step`, or from a whole training loop, `train`."""
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    optimizers: list[Any] = (
        list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer else []
    )
    watched = SimpleStep(step, models, optimizers) if step else SimpleLoop(train, models, optimizers)
    watched.names = names
    return watched


class SimpleStep:
    """A system made from a function that trains one step of `models` with `optimizers`."""

    names: Any = None

    def __init__(self, function: Callable[..., Any] | None, models: list[nn.Module], optimizers: list[Optimizer]):
        assert function is not None, "watch takes step=... or train=..."
        self.function, self.models, self.optimizers = function, models, optimizers

    def named(self, of: Callable[[nn.Module], Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters or buffers by name, without names of wrappers: `module.` of DDP, `_orig_mod.` of compile."""
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            for name, tensor in of(model):
                yield prefix + name.replace("_orig_mod.", "").removeprefix("module."), tensor

    def show_gradients(self, optimizer: Optimizer, keep: Keep) -> None:
        """Pass the gradients that an optimizer is about to use to `keep`."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in self.named(nn.Module.named_parameters):
            if id(parameter) in held and parameter.grad is not None:
                keep("grad", name, parameter.grad)

    def show_rest(self, keep: Keep) -> None:
        """Pass the buffers, the parameters and the state of all optimizers to `keep`."""
        for name, buffer in self.named(nn.Module.named_buffers):
            keep("buffer", f"{name}@after_optimizer", buffer)
        for name, parameter in self.named(nn.Module.named_parameters):
            keep("param", name, parameter)
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, (Tensor, int, float)):
                        keep("optimizer", f"{name}.{key}", torch.as_tensor(value))

    def step(self, index: int, keep: Keep) -> None:
        """Train one step, and pass its tensors to `keep`."""
        with ExitStack() as hooks:
            for optimizer in self.optimizers:
                shown = optimizer.register_step_pre_hook(lambda its, *_: self.show_gradients(its, keep))
                hooks.callback(shown.remove)
            loss = self.function(index)
        self.show_rest(keep)
        if loss is not None:
            keep("loss", "loss", torch.as_tensor(loss))


class SimpleLoop(SimpleStep):
    """A system made from a training loop. A step ends when every optimizer has taken a step."""

    def take_steps(self, number: int, keep_of: Callable[[int], AbstractContextManager[Keep]]) -> None:
        """Run the loop, and stop it after `number` steps. `keep_of(index)` is a context that yields a step's `keep`."""
        index, left = 0, set[int]()
        own = {id(each) for _, each in self.named(nn.Module.named_parameters)}

        # `left` has the optimizers that have not taken this step yet. Optimizers that the loop makes itself become
        # known when they first take a step.
        def before(optimizer: Optimizer, *_: Any) -> None:
            if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
                if not any(optimizer is each for each in self.optimizers):
                    self.optimizers.append(optimizer)
                left.update(() if left else map(id, self.optimizers))
                with keep_of(index) as keep:
                    self.show_gradients(optimizer, keep)

        def after(optimizer: Optimizer, *_: Any) -> None:
            nonlocal index
            if id(optimizer) not in left:
                return
            left.remove(id(optimizer))
            if not left:
                with keep_of(index) as keep:
                    self.show_rest(keep)
                index += 1
                if index == number:
                    raise LastStep

        with ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(before).remove)
            hooks.callback(register_optimizer_step_post_hook(after).remove)
            with suppress(LastStep):
                self.function()
