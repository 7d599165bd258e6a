"""Records optimizer state that is not in the optimizer's `state`: settings of parameter groups, and attributes.

torch's own optimizers have all of their state in `state`, but Prodigy's step size is a setting of its groups, and
schedulers write the learning rate there. Each number or tensor that changes during a step is recorded under a name that
ends in `@changed`:

    0.weight.lr@changed             a setting, recorded for each parameter of the group
    optimizer.0.momentum.1@changed  an attribute, by its path

For example, if StepLR halves the learning rate 0.1 in step 3, only step 3 has the record `0.weight.lr@changed`, 0.05.
Flags and texts are left out, and so are tensors that share memory with recorded tensors.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitproof.harness.records import CHANGED

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_NOT_SEARCHED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


class OptimizerExtras:
    """The settings and attributes of `holder` at the start of a step.

    `holder` is an optimizer, or an object that wraps optimizers.
    """

    def __init__(self, holder: Any, optimizers: Sequence[Optimizer], models: Iterable[Any] = ()) -> None:
        self._holder = holder
        self._optimizers = optimizers
        self._models = list(models)
        self._settings = {key: _comparable(value) for key, value in _settings(holder)}
        self._groups = len(getattr(holder, "param_groups", ()))
        self._attributes = {name: _comparable(value) for name, value in self._unrecorded_leaves()}

    def changed_settings(self) -> dict[int, dict[str, Tensor]]:
        """Return the settings that have changed during the step, as index of a parameter group -> name -> value.

        The names end in `@changed`.
        """
        found: dict[int, dict[str, Tensor]] = {}
        for (group, name), value in _settings(self._holder):
            # A group that was added during the step has no earlier settings.
            if group < self._groups and _comparable(value) != self._settings.get((group, name)):
                found.setdefault(group, {})[f"{name}{CHANGED}"] = _number_of(value)
        return found

    def changed_attributes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, value) for each attribute that has changed since the start of the step.

        The path ends in `@changed`.
        """
        for name, value in self._unrecorded_leaves():
            if _comparable(value) != self._attributes.get(name):
                yield f"{name}{CHANGED}", tensor_of(value)

    def _unrecorded_leaves(self) -> Iterator[tuple[str, Any]]:
        names = _names_of(self._optimizers)
        # The search must not enter an optimizer, its state or its groups again, as their content is recorded.
        known = {id(place) for each in self._optimizers for place in (each, each.state, each.param_groups)}
        tensors = [*_tensors_of(self._optimizers, self._models)]
        shown, memory = {id(tensor) for tensor in tensors}, {_memory(tensor) for tensor in tensors} - {None}
        for path, value in _leaves_in(getattr(self._holder, "__dict__", {}), "", names, known, depth=1):
            if id(value) not in shown and _memory(value) not in memory:
                yield path, value


def _settings(holder: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yield (key, value) for each number, tensor, or list of these, in an optimizer's parameter groups.

    A key is (index of the group, path): `((1, "lr"), 0.001)` is `lr` of group 1.
    """
    for number, group in enumerate(getattr(holder, "param_groups", ())):
        # The parameters themselves are recorded under their own names.
        settings = {name: value for name, value in group.items() if name != "params"}
        for path, value in _leaves_in(settings, "", {}, set(), depth=0):
            yield (number, path), value


def _leaves_in(
    place: Any, prefix: str, names: Mapping[int, str], known: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each tensor and number inside the object `place`. A list of numbers counts as one tensor.

    - `prefix`: path of the object.
    - `names`: id of a parameter -> name.
    - `known`: ids of objects to skip.
    - `depth`: how many levels of attributes to search.
    """
    import numpy
    from torch import Tensor, nn

    # First of all, as a bool is an int.
    if isinstance(place, (bool, str, bytes, *_NOT_SEARCHED)) or place is None:
        return
    if isinstance(place, (Tensor, int, float, complex)):
        yield prefix, place
    elif isinstance(place, (numpy.ndarray, numpy.generic)):
        # Integers, floats and complex numbers.
        if place.dtype.kind in "iufc":
            yield prefix, tensor_of(place)
    elif id(place) not in known:
        # Objects may refer to each other in cycles.
        known = known | {id(place)}
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(place, nn.Module):
            inner = (*place.named_parameters(), *place.named_buffers())
        elif isinstance(place, (Mapping, types.MappingProxyType)):
            inner = [(_key(key, number, names), value) for number, (key, value) in enumerate([*place.items()])]
        elif isinstance(place, (list, tuple, deque)):
            has_tensors = any(isinstance(value, Tensor) for value in place)
            if not has_tensors and (joined := joined_values(place)) is not None:
                yield prefix, joined
            else:
                inner = enumerate(place)
        elif depth and hasattr(place, "__dict__"):
            inner, depth = [*vars(place).items()], depth - 1
        for key, value in inner:
            yield from _leaves_in(value, f"{prefix}.{key}".lstrip("."), names, known, depth)


def _key(key: Any, number: int, names: Mapping[int, str]) -> str:
    # Names must be the same in every run, so an object's id or text cannot be used.
    if (name := names.get(id(key)) or (names.get(key) if isinstance(key, int) else None)) is not None:
        return name
    return f"{key}" if isinstance(key, (str, int)) else f"{number}"


def _names_of(optimizers: Iterable[Optimizer]) -> dict[int, str]:
    # A name must be the same in every run, so it is the parameter's number, not its id.
    held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    # Reversed, so that a parameter of two groups gets the name of its first place.
    return {id(p): f"param{number}" for number, p in reversed([*enumerate(held)])}


def _tensors_of(optimizers: Iterable[Optimizer], models: Iterable[Any]) -> Iterator[Tensor]:
    from torch import Tensor

    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    # Frozen parameters, for example, may be in no optimizer.
    parameters += [p for model in models for p in model.parameters()]
    for parameter in parameters:
        yield parameter
        # Gradients have records of their own.
        if parameter.grad is not None:
            yield parameter.grad
    for model in models:
        yield from model.buffers()
    for each in optimizers:
        for _, value in _leaves_in(each.state, "", {}, set(), depth=0):
            if isinstance(value, Tensor):
                yield value


def _memory(value: Any) -> int | None:
    from torch import Tensor

    if not isinstance(value, Tensor):
        return None
    try:
        # Tensors without elements have address 0, and share nothing.
        return value.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _comparable(value: Any) -> Any:
    from torch import Tensor

    # By digest, or by type and text: equality would miss changes such as 0.0 to -0.0.
    from bitproof.harness.capture.digest import digest
    from bitproof.harness.errors import RecordingError

    if not isinstance(value, Tensor):
        return type(value).__name__, repr(value)
    try:
        return digest(value)
    except (RecordingError, RuntimeError):  # a tensor without values cannot be recorded
        return None


def _number_of(value: Any) -> Tensor:
    import torch

    # A single number becomes float64, even if it was a tensor of another dtype.
    tensor = tensor_of(value)
    return tensor.detach().to("cpu", torch.float64).reshape(()) if tensor.numel() == 1 else tensor


def tensor_of(value: Any) -> Tensor:
    """Convert a value to a tensor: an array keeps its dtype, and a number becomes float64 or complex128.

    A tensor is returned unchanged.
    """
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)


def joined_values(values: Iterable[Any]) -> Tensor | None:
    """Concatenate all tensors and numbers of a list into a flat tensor, skipping None. A DTensor gives its local shard.

    Returns None if the list has values of other types, of several dtypes or of several devices.
    """
    import torch

    from bitproof.harness.capture.digest import plain

    held = [value for value in values if value is not None]
    if not all(isinstance(value, (torch.Tensor, int, float)) for value in held):
        return None
    given = [tensor_of(value) for value in held]
    if len({(tensor.dtype, tensor.device) for tensor in given}) > 1:
        return None
    # Shards of two meshes cannot be joined as DTensors.
    tensors = [plain(tensor).reshape(-1) for tensor in given]
    return torch.cat(tensors) if tensors else torch.empty(0)
