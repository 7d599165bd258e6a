"""`watch` makes a system of a training function, and records the values of each training step.

At every step it records, in this order

    grad        of each parameter, as the optimizer reads it: when its `step` begins, after clipping and accumulation;
                if a closure computes gradients, at the end of its first call. A gradient of None is
                recorded as a tensor without elements, a sparse gradient as <name>.indices and <name>.values
    buffer      of each module: before the first gradient is recorded as <name>@before_optimizer, and after the step as
                <name>@after_optimizer
    param       each parameter after the step, frozen parameters included
    optimizer   its state as <parameter>.<state>; without any state, the learning rate as <parameter>.lr;
                settings and attributes that the step has changed (`optimizer_extras`), as <parameter>.<setting>@changed
    loss        the function's result, if it is not None; for a whole loop the sum of the numbers from which backward
                started, added in their order in float64, on ranks with such a number

Names are those of the model without wrappers such as DistributedDataParallel (`bare_names`). If two models have a name
in common, all names begin with the model's index. A parameter that is in no model has a name such as
`optimizer.0.group1.param0`. For a DTensor, each rank records its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Any

from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.records import CHANGED, OPTIMIZERS
from bitproof.harness.systems.bare_names import bare_tensors
from bitproof.harness.systems.optimizer_extras import OptimizerExtras, joined_values, tensor_of
from bitproof.harness.systems.optimizer_settings import SettingsLog
from bitproof.harness.within_user_code import refusals_raised, refusing, theirs

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Observe = Callable[[str, str, "Tensor"], None]

_LATE = ("d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss", "al")
"""State that LBFGS creates only in a later step, the first with enough iterations."""


@refusing()
def watch(
    step: Callable[[int], Any] | None = None,
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    train: Callable[[], Any] | None = None,
    loss: Callable[..., Any] | None = None,
    names: Mapping[str, str] | None = None,
    independent_ranks: bool = False,
) -> WatchedStep:
    """Make a system of a function that trains, and record the values of each training step.

    - `step`: takes the step's index, trains once, and returns the loss or None.
    - `train`: instead of `step`, runs a framework's whole loop, of at least as many steps as the case. A training step
      ends when its optimizers have run their steps. The loop is left after the case's last step.
    - `model`, `optimizer`: the trained model and its optimizer, or lists of several.
    - `optimizer` may be left out with `train`. Then each optimizer with parameters of the model counts, and a step ends
      when all parameters that require gradients have been stepped.
    - `loss`: with `train`, the framework's method that returns each loss, such as torchtitan's
      `trainer.forward_backward_step`. Without it the loss is the tensor from which backward starts. If a graph computes
      the gradients, there is no such tensor.
    - `names`, `independent_ranks`: as in any system.

    Return the result from a factory. Raises UsageError for an object that is not a model or not an optimizer, for a
    `loss` that is not a method of an object, and unless exactly one of `step` and `train` is given.
    """
    from torch import nn

    from bitproof.harness.systems.watched_loop import WatchedLoop

    if step is not None and optimizer is None:
        raise UsageError("watch was given a step without its optimizer", expected="optimizer=...")

    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    for each in models:
        if not isinstance(each, nn.Module):
            raise UsageError(
                "watch was given a model that is none", expected="a torch.nn.Module", found=type(each).__name__
            )
    # Names must not depend on wrappers such as DistributedDataParallel, which the other system may lack.
    models, optimizers = [bare(each) for each in models], [] if optimizer is None else held_optimizers(optimizer)
    if step is not None and train is None:
        watched = WatchedStep(step, models, optimizers)
    elif train is not None and step is None:
        if loss is not None and not isinstance(loss, MethodType):
            raise UsageError(
                "watch was given a loss that is no method", expected="loss=trainer.method", found=type(loss).__name__
            )
        watched = WatchedLoop(train, models, optimizers, loss)
    else:
        raise UsageError(
            "watch takes one function that trains", expected="step=..., which trains once, or train=..., a whole loop"
        )
    watched.holders = _holders(optimizer)
    watched.names = dict(names or {})
    watched.independent_ranks = independent_ranks
    return watched


class WatchedStep:
    """A system that calls a function to train, and records its models and optimizers after each step."""

    shows_every_buffer = True

    def __init__(self, step: Callable[[int], Any], models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self.names: dict[str, str] = {}
        self.independent_ranks = False
        self._step = step
        self.watched_optimizers = optimizers
        self._settings = SettingsLog()
        self.holders: list[Any] = []
        """Objects that wrap watched optimizers, such as Lookahead around another optimizer."""
        self.watch_models(models)
        self.begin_step()

    def watch_models(self, models: list[nn.Module]) -> None:
        self.model = models[0] if len(models) == 1 else None
        self.models = models
        self._prefixes = _prefixes(models)

    def begin_step(self, index: int = 0) -> None:
        self.is_before_step, self._index = True, index
        self._seen = list(self.watched_optimizers)
        self._beside = {
            id(each): OptimizerExtras(each, self._seen, self.models) for each in (*self._seen, *self.holders)
        }

    def placing(self, observe: Observe) -> Observe:
        """Wrap `observe` so that a part of a flat FSDP1 parameter is recorded with its position in the whole parameter.

        The position is an attribute of the tensor. This applies to parameters, gradients and optimizer states.
        """
        from bitproof.harness.capture.digest import FLAT
        from bitproof.harness.torch_distributed import flattened_parts

        parts = {parameter: part for model in self.models for parameter, part in flattened_parts(model).items()}
        if not parts:
            return observe
        of_name = {name: parts[id(p)] for name, p in self.trained_parameters().items() if id(p) in parts}

        def placed(kind: str, name: str, tensor: Tensor) -> None:
            # A name of kind `optimizer` ends with the name of the state.
            part = of_name.get(name if kind in ("grad", "param") else name.rpartition(".")[0])
            if part is not None and kind == "optimizer" and part[1] == part[2]:
                return  # a part without elements has no state
            # A state of another size, such as Adam's number of steps, has no position.
            if part is not None and tensor.dim() == 1 and tensor.numel() == part[2] - part[1]:
                tensor = tensor.detach()
                # The detached tensor is a new object, so the user's tensor gets no attribute.
                setattr(tensor, FLAT, part)
            observe(kind, name, tensor)

        return placed

    def manifest(self) -> dict[str, Any]:
        return {OPTIMIZERS: self._settings.entries}

    def _named_models(self) -> Iterator[tuple[str, nn.Module]]:
        return zip(self._prefixes, self.models, strict=True)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, model in self._named_models():
            for name, module in model.named_modules():
                yield (prefix + name).rstrip("."), module

    def step(self, index: int, observe: Observe) -> None:
        """Train once, and record the values.

        Raises RecordingError if no optimizer took a step, or if the loss is not a number.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        observe = self.placing(observe)
        self.begin_step(index)
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: self.note(optimizer)).remove)
            # Hooks run in the order of their registration, so ours see the gradients after the trainer's hooks.
            for optimizer in self.watched_optimizers:
                hook = self.show_gradients(optimizer, observe)
                stack.callback(optimizer.register_step_pre_hook(hook).remove)
            with refusals_raised():
                loss = self._step(index)
        if self.is_before_step:
            raise RecordingError(
                f"step({index}) ended, and no watched optimizer had taken a step",
                expected="one training step a call, with all of its micro-batches",
                fix="give watch the optimizer whose step() is called",
            )
        self.show_state_after_step(self.watched_optimizers, observe)
        # A rank may have no loss, for example without the last stage of a pipeline.
        if loss is not None:
            observe("loss", "loss", _number(loss, index))

    def show_state_after_step(self, optimizers: Sequence[Optimizer], observe: Observe) -> None:
        self._show_buffers("after_optimizer", observe)
        trained = self.trained_parameters()
        for name, parameter in (*trained.items(), *self._parameters_outside_models(trained)):
            observe("param", name, parameter)
        for optimizer in optimizers:
            self._show_state(optimizer, observe)
        self._show_other_states(optimizers, observe)
        # A holder that is itself an optimizer was recorded with the other optimizers.
        for number, holder in enumerate(self.holders):
            if any(holder is each for each in self._seen):
                continue
            for name, value in self._beside[id(holder)].changed_attributes():
                observe("optimizer", f"optimizer.holder{number}.{name}", value)

    def show_gradients(self, optimizer: Optimizer, observe: Observe) -> Any:
        """Return a hook that records the gradients that an optimizer's step is about to read.

        If a closure computes the gradients, the hook wraps the closure, and records at the end of its first call.
        """
        from bitproof.harness.torch_compat import is_within_own_step

        is_shown = False

        def show() -> None:
            if self.is_before_step:
                self.is_before_step = False
                self._show_buffers("before_optimizer", observe)
            names = {id(parameter): name for name, parameter in self._parameters_of(optimizer)}
            self._settings.note(self._index, self._number(optimizer), optimizer, names)
            for name, parameter in self._parameters_of(optimizer):
                gradient = _nothing_of(parameter) if parameter.grad is None else parameter.grad
                for part, tensor in _parts(gradient).items():
                    observe("grad", name + part, tensor)

        @refusing()
        def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal is_shown
            # A subclass that calls `super().step()` runs the hook again, for the same step.
            if is_within_own_step(optimizer):
                return None
            is_shown = False
            changed = around_closure(args, kwargs, showing)
            if changed is None:
                show()
            return changed

        def showing(closure: Callable[[], Any]) -> Callable[[], Any]:
            @refusing()
            def shown() -> Any:
                nonlocal is_shown
                loss = theirs(closure)
                if not is_shown:  # LBFGS calls the closure several times per step
                    is_shown = True
                    show()
                return loss

            return shown

        return hook

    def _show_buffers(self, when: str, observe: Observe) -> None:
        for prefix, model in self._named_models():
            for name, buffer in bare_tensors(model, "buffers"):
                observe("buffer", f"{prefix}{name}@{when}", buffer)

    def _show_state(self, optimizer: Optimizer, observe: Observe) -> None:
        from torch.optim import LBFGS

        # Each parameter gets the keys of all, so that the names are the same in each step: a parameter that has had no
        # gradient so far has no state, and its records have no elements.
        states = {name: dict(_leaves(optimizer.state.get(p, {}))) for name, p in self._parameters_of(optimizer)}
        keys = dict.fromkeys(key for state in states.values() for key in state)
        # These names are recorded in each step, also before LBFGS creates the state.
        if isinstance(optimizer, LBFGS):
            keys |= dict.fromkeys(_LATE)
        rates = {id(p): group.get("lr", 0.0) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self._parameters_of(optimizer):
            for key in keys:
                observe("optimizer", f"{name}.{key}", states[name].get(key, _nothing_of(parameter)))
            if not keys:
                rate = rates.get(id(parameter))
                observe("optimizer", f"{name}.lr", _nothing_of(parameter) if rate is None else tensor_of(rate))
        self._show_beside(
            optimizer, {id(p): name for name, p in self._parameters_of(optimizer)}, observe, has_rate=not keys
        )

    def _show_beside(self, optimizer: Optimizer, names: Mapping[int, str], observe: Observe, *, has_rate: bool) -> None:
        beside, prefix = self._beside[id(optimizer)], f"optimizer.{self._number(optimizer)}."
        for group, settings in beside.changed_settings().items():
            for parameter in optimizer.param_groups[group]["params"]:
                for key, value in settings.items():
                    if not (has_rate and key == f"lr{CHANGED}"):  # recorded as <parameter>.lr
                        observe("optimizer", f"{names[id(parameter)]}.{key}", value)
        by_name = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
        for name, value in (*_leaves(by_name), *beside.changed_attributes()):
            observe("optimizer", f"{prefix}{name}", value)

    def _show_other_states(self, shown: Sequence[Optimizer], observe: Observe) -> None:
        named = {id(p): name for name, p in self.trained_parameters().items()}
        # A parameter in two optimizers has two states: the second needs a name of its own.
        held = {id(p) for each in shown for group in each.param_groups for p in group["params"]}
        states = {id(each.state) for each in shown}
        for number, optimizer in enumerate(self._seen):
            if any(optimizer is each for each in shown):
                continue
            names = {}
            for place, parameter in _index_names(number, optimizer):
                names[id(parameter)] = place if id(parameter) in held else named.get(id(parameter), place)
                if id(optimizer.state) not in states:
                    for key, value in _leaves(optimizer.state.get(parameter, {})):
                        observe("optimizer", f"{names[id(parameter)]}.{key}", value)
            held |= names.keys()
            self._show_beside(optimizer, names, observe, has_rate=False)

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return name without wrappers -> parameter, for all models.

        Raises RecordingError if two parameters have the same name, because one was registered after the call of
        `watch`.
        """
        named: dict[str, Tensor] = {}
        for prefix, model in self._named_models():
            for name, parameter in bare_tensors(model, "parameters"):
                if named.setdefault(prefix + name, parameter) is not parameter:
                    raise RecordingError(
                        f"two parameters of the watched models are named {prefix + name!r}",
                        expected="a name of its own for every parameter",
                        found="one of them was registered after watch had named the models",
                        fix="register all parameters before watch is called",
                    )
        return named

    @refusing()
    def note(self, optimizer: Optimizer) -> None:
        """Note an optimizer that takes a step, so that its parameters are recorded even if it was not passed to
        `watch`.
        """
        if all(optimizer is not each for each in self._seen):
            self._seen.append(optimizer)
            self._beside[id(optimizer)] = OptimizerExtras(optimizer, self._seen, self.models)

    def _number(self, optimizer: Optimizer) -> int:
        self.note(optimizer)
        return next(number for number, each in enumerate(self._seen) if each is optimizer)

    def _parameters_outside_models(self, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        shown = {id(p) for p in trained.values()}
        for number, optimizer in enumerate(self._seen):
            for name, parameter in _index_names(number, optimizer):
                if id(parameter) not in shown:
                    shown.add(id(parameter))
                    yield name, parameter

    def _parameters_of(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        held = {id(p): (name, p) for name, p in _index_names(self._number(optimizer), optimizer)}
        # Trainable parameters that no optimizer has, because a trainer forgot them, are recorded with the first
        # optimizer.
        is_first = bool(self.watched_optimizers) and optimizer is self.watched_optimizers[0]
        by_all = {
            id(p) for each in self.watched_optimizers for settings in each.param_groups for p in settings["params"]
        }
        for name, parameter in self.trained_parameters().items():
            is_forgotten = is_first and parameter.requires_grad and id(parameter) not in by_all
            if held.pop(id(parameter), None) or is_forgotten:
                yield name, parameter
        yield from held.values()


def _index_names(number: int, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group, settings in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(settings["params"]):
            yield f"optimizer.{number}.group{group}.param{index}", parameter


def around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Callable[[], Any]], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of an optimizer's step as (args, kwargs), with the closure replaced by `wrap(closure)`.

    None if there is no closure. `args` and `kwargs` are those that a hook of the step gets.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if closure is None:
        return None
    return (
        ((args[0], wrap(closure), *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": wrap(closure)})
    )


def held_optimizers(given: Any) -> list[Optimizer]:
    """Return torch's optimizers in an object, which may be an optimizer, a list, or an object of Accelerate.

    Raises UsageError for any other object.
    """
    from torch.optim import Optimizer

    if isinstance(given, (list, tuple)):
        return [optimizer for each in given for optimizer in held_optimizers(each)]
    # First, as Accelerate's wrapper is itself an Optimizer of torch.
    for inner in (getattr(given, "optimizer", None), getattr(given, "optimizers", None)):
        if isinstance(inner, (Optimizer, list, tuple)):
            return held_optimizers(inner)
    if not isinstance(given, Optimizer):
        raise UsageError(
            "watch was given an optimizer that is none", expected="a torch.optim.Optimizer", found=type(given).__name__
        )
    return [given]


def _holders(given: Any) -> list[Any]:
    from torch.optim import Optimizer

    if isinstance(given, (list, tuple)):
        return [holder for each in given for holder in _holders(each)]
    for inner in (getattr(given, "optimizer", None), getattr(given, "optimizers", None)):
        if isinstance(inner, (Optimizer, list, tuple)):
            return [given, *_holders(inner)]
    return []


def bare(model: nn.Module) -> nn.Module:
    """Return a model without its outer wrappers: DistributedDataParallel, DataParallel and torch.compile."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        # torch.compile's wrapper has this child alone. A module with tensors of its own is no wrapper.
        elif [name for name, _ in model.named_children()] == ["_orig_mod"] and not _has_own_tensors(model):
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _has_own_tensors(model: nn.Module) -> bool:
    return bool([*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)])


def _prefixes(models: list[nn.Module]) -> list[str]:
    held: dict[str, Tensor] = {}
    for model in models:
        for name, tensor in (*bare_tensors(model, "parameters"), *bare_tensors(model, "buffers")):
            if held.setdefault(name, tensor) is not tensor:
                return [f"{index}." for index in range(len(models))]
    return [""] * len(models)


def _leaves(state: Mapping[Any, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    from torch import Tensor

    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        # A list may grow from step to step, as in LBFGS, and names must be the same in each step.
        if isinstance(value, (list, tuple)) and (joined := joined_values(value)) is not None:
            yield f"{prefix}{key}", joined
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, (Tensor, int, float)):
            yield f"{prefix}{key}", tensor_of(value)


def _parts(gradient: Tensor) -> dict[str, Tensor]:
    if not gradient.is_sparse:
        return {"": gradient}
    from bitproof.harness.torch_operators import sparse_parts

    indices, values = sparse_parts(gradient)
    return {".indices": indices, ".values": values}


def _nothing_of(parameter: Tensor) -> Tensor:
    import torch

    return torch.empty(0, dtype=parameter.dtype)


def _number(loss: Any, index: int) -> Tensor:
    from torch import Tensor

    if not isinstance(loss, (Tensor, int, float)):
        raise RecordingError(
            f"step({index}) returned no loss", expected="a tensor of one number, a number, or None", found=repr(loss)
        )
    return tensor_of(loss.detach() if isinstance(loss, Tensor) else float(loss))
