"""Divides a framework's training loop, which runs all steps in one call, into recorded steps.

Hooks of torch's optimizers report when an optimizer's step begins and ends:

1. When an optimizer's step begins, its gradients are recorded (if the optimizer counts: `WatchedLoop.counts`).
2. When all optimizers that count have stepped, the training step ends. The resulting values are recorded. Work after
   this, such as setting the learning rate, belongs to the next step.
3. After the last step, an exception is raised to leave the loop. The framework's `except Exception` does not catch it.

The loss is the tensor from which backward starts, or the result of a method of the framework.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest import mock

from bitproof.harness.errors import RecordingError
from bitproof.harness.systems.watched_step import Observe, WatchedStep, held_optimizers
from bitproof.harness.within_user_code import refusals_raised, refusing, theirs

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


_MOST_TIMES_LEFT = 100


class _LoopDoneError(BaseException):
    """Raised to leave a loop that has run all steps. `except Exception` does not catch it."""


def _leave() -> None:
    raise _LoopDoneError


class WatchedLoop(WatchedStep):
    """A system that runs a whole training loop, and records its models and optimizers after each step.

    - `train`: runs the loop.
    - `loss`: method that returns losses; None if losses are the tensors from which backward starts.
    """

    def __init__(
        self,
        train: Callable[[], Any],
        models: list[nn.Module],
        optimizers: list[Optimizer],
        loss: MethodType | None = None,
    ) -> None:
        super().__init__(lambda index: None, models, optimizers)
        self._train = train
        self._loss = loss
        self._frozen: set[int] = set()
        """Ids of parameters that require no gradients and belong to no optimizer."""

    def take_steps(self, num_steps: int, taking: Callable[[int], AbstractContextManager[Observe]]) -> None:
        """Run the loop for `num_steps` steps, each in the context `taking(index)`.

        Raises RecordingError if the loop ends earlier, or if it is unclear which optimizers belong to a step.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from bitproof.harness.torch_operators import on_backward

        steps = _Steps(self, num_steps, taking)
        # A hook for all optimizers, since the loop may make its optimizers only later.
        hook = register_optimizer_step_pre_hook(steps.optimizer_begins)
        # Without a method for the loss, the loss is the tensor that backward begins with.
        keeping = _results_noted(self._loss, steps.keep_loss) if self._loss else on_backward(steps.keep_loss)
        with refusals_raised():
            try:
                with steps.open, keeping:
                    steps.begin()
                    self._train()
                    # Reached only if the loop returns: after the last step, an exception leaves it.
                    raise self.too_short(steps.index, num_steps)
            except BaseException:
                if not steps.are_over:  # errors after the last step come from leaving the loop
                    raise
            finally:
                for each in (hook.remove, *(hooks.close for hooks in steps.hooks.values())):
                    each()

    def optimizer_begins(self, optimizer: Optimizer) -> bool:
        """Note an optimizer that begins its step, and return whether the models have changed.

        Here the models never change, but a subclass may find new ones.
        """
        self.note(optimizer)
        return False

    def counts(self, optimizer: Optimizer) -> bool:
        """Return whether the training step must wait for this optimizer.

        It waits for the optimizers that were passed to `watch`. If none were passed, it waits for each optimizer that
        has parameters of the models and wraps no other optimizer.
        """
        if self.watched_optimizers:
            return any(optimizer is each for each in self.watched_optimizers)
        # The wrapped optimizer takes a step of its own, so only that step counts.
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        is_ours = any(id(p) in held for p in self.trained_parameters().values())
        return is_ours and held_optimizers(optimizer) == [optimizer]

    def is_complete(self, stepped: Sequence[Optimizer]) -> bool:
        """Return whether a training step is complete, after the optimizers in `stepped` have run.

        All optimizers that were passed to `watch` must have run. If none were passed, all parameters must be stepped,
        except frozen parameters without an optimizer.
        """
        if self.watched_optimizers:
            return len(stepped) == len(self.watched_optimizers)
        held = held_by(stepped)
        left = [p for p in self.trained_parameters().values() if id(p) not in held]
        return not any(p.requires_grad for p in left) and not self._may_take_turns({id(p) for p in left})

    def check_losses(self, losses: list[Tensor]) -> None:
        """Raise RecordingError if a step with these losses would never end. Only subclasses do so."""

    def show_losses(self, losses: list[Tensor], observe: Observe) -> None:
        if losses:
            observe("loss", "loss", sum_of_losses(losses))

    def _may_take_turns(self, frozen: set[int]) -> bool:
        # A parameter may be frozen only until another optimizer's step, as when Lightning alternates between
        # optimizers.
        if not frozen - self._frozen:
            return False
        from torch.optim import Optimizer

        # A search through all objects is slow, so parameters that no optimizer has are remembered in `_frozen`.
        held = held_by(each for each in gc.get_objects() if issubclass(type(each), Optimizer))
        self._frozen |= frozen - held
        return bool(frozen & held)

    def too_short(self, taken: int, num_steps: int) -> RecordingError:
        return RecordingError(
            f"the training loop ended after {taken} steps of its optimizer",
            expected=f"at least {num_steps} steps, as the case says",
            fix="let the loop go on for longer, or give --steps",
        )


@contextmanager
def _results_noted(method: MethodType, note: Callable[[Tensor], None]) -> Iterator[None]:
    from torch import Tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if isinstance(result, Tensor):
            note(result)
        return result

    with mock.patch.object(method.__self__, method.__name__, call):
        yield


class _Steps:
    """The progress of a loop: the index of the current step, and the optimizers that have stepped in it."""

    def __init__(self, loop: WatchedLoop, num_steps: int, taking: Callable[[int], Any]) -> None:
        # `open` has the context of the current step, and `hooks` the two hooks of each optimizer, by its id.
        self.index = 0
        self.are_over = False
        self.open = ExitStack()
        self.hooks: dict[int, ExitStack] = {}
        from bitproof.harness.torch_compat import is_within_own_step

        self._is_within_own_step = is_within_own_step
        self._loop = loop
        self._num_steps = num_steps
        self._taking = taking
        self._stepped: list[Optimizer] = []
        self._losses: list[Tensor] = []
        self._times_left = 0

    def begin(self) -> None:
        self._shown = self.open.enter_context(self._taking(self.index))
        self._observe: Observe = self._loop.placing(self._shown)
        self._stepped, self._losses = [], []
        self._loop.begin_step(self.index)

    @refusing()
    def keep_loss(self, root: Tensor) -> None:
        # Other roots are no losses, such as the outputs of a pipeline stage.
        if root.numel() == 1 and root.is_floating_point():
            self._losses.append(root.detach())
            self._loop.check_losses(self._losses)

    @refusing()
    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add two hooks to an optimizer that is about to begin a step, if it counts (`WatchedLoop.counts`).

        The first hook records the gradients. The second hook ends the training step if all optimizers have stepped.
        """
        # A subclass that calls `super().step()` runs the hooks twice for a single step.
        if self._is_within_own_step(optimizer):
            return
        hooks = self.hooks.setdefault(id(optimizer), ExitStack())
        hooks.close()  # removes the hooks of its previous step, as a hook cannot be removed while it runs
        if self.are_over:
            self._leave_again()
        if self._loop.optimizer_begins(optimizer):
            self._observe = self._loop.placing(self._shown)
        if not self._loop.counts(optimizer):
            return
        if any(optimizer is other for other in self._stepped):
            raise RecordingError(
                f"an optimizer of type {type(optimizer).__name__} took two steps in step {self.index}, before others "
                "that hold parameters of the model took one",
                expected="every watched optimizer to take one step",
                fix="give watch the optimizers that train: optimizer=[...]",
            )
        # Added only now, so that they run after all other hooks of the optimizer.
        show = self._loop.show_gradients(optimizer, self._observe)
        hooks.callback(optimizer.register_step_pre_hook(show).remove)
        hooks.callback(optimizer.register_step_post_hook(self._optimizer_ends).remove)

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any) -> None:
        with refusing():
            if self._is_within_own_step(optimizer):
                return
            self._stepped.append(optimizer)
            if not self._loop.is_complete(self._stepped):
                return
            self._end_step()
        if self.are_over:
            # Not within `refusing`: leaving the loop is no refusal.
            raise _LoopDoneError

    def _leave_again(self) -> None:
        self._times_left += 1
        if self._times_left > _MOST_TIMES_LEFT:
            raise RecordingError(
                f"the training loop goes on after its last step: it caught what leaves it {_MOST_TIMES_LEFT} times",
                expected="a loop that ends when a BaseException is raised within it",
                fix="catch Exception in its place, as in `except Exception:` for `except:`",
            )
        # This exception is no refusal, although it is raised within `refusing`.
        theirs(_leave)

    def _end_step(self) -> None:
        self._loop.show_state_after_step(self._stepped, self._observe)
        self._loop.show_losses(self._losses, self._observe)
        self.open.close()
        self.index += 1
        self.are_over = self.index == self._num_steps
        if not self.are_over:
            self.begin()


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for each in optimizers for group in getattr(each, "param_groups", ()) for p in group["params"]}


def sum_of_losses(losses: list[Tensor]) -> Tensor:
    """Return the sum of losses, added in order in float64. A single loss is returned unchanged."""
    import torch

    if len(losses) == 1:
        return losses[0]
    total = torch.zeros((), dtype=torch.float64)
    for loss in losses:
        # A loss may be on any device, and have the shape [1].
        local: Any = loss.to_local() if hasattr(loss, "to_local") else loss
        total += local.reshape(()).cpu()
    return total
