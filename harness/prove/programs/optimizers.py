"""An optimizer among a program's inputs: its state is input and output, by name, as a module's parameters are.

    optimizer NAME.KEY      what it keeps of a module's parameter NAME, a tensor; `written ...` is what a step leaves

What it keeps that is no tensor, and its settings, are part of the program; where a step changes those, it is another
program in the next step, and that one is not proved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bitproof.harness.prove.graphs.export import RefusedError

OPTIMIZER = "optimizer "


class HeldOptimizers:
    """The optimizers among what a program is given; `names` has the name of each of the modules' parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self.optimizers = optimizers
        self._slots: dict[str, tuple[Optimizer, Tensor, str]] = {}
        self._names: dict[int, str] = {}
        for optimizer in optimizers:
            for parameter in (x for group in optimizer.param_groups for x in group["params"]):
                if id(parameter) not in names:
                    what = "an optimizer of a parameter that no module among the inputs has"
                    raise RefusedError(what, where="the inputs")
                name = self._names[id(parameter)] = names[id(parameter)]
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        self._slots[f"{OPTIMIZER}{name}.{key}"] = optimizer, parameter, key
        self.new: dict[str, Tensor] = {}
        self.host_side: list[str] = []

    @property
    def state(self) -> dict[str, Tensor]:
        """Its tensors, by name."""
        return {name: optimizer.state[parameter][key] for name, (optimizer, parameter, key) in self._slots.items()}

    @contextmanager
    def swapped(self, given: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Have the optimizers update these parameters, and keep these tensors, by name. What is in another tensor's
        place at the end, or is kept since then, is in `new`, and what else has changed is named in `host_side`."""
        kept = [(x, [dict(group) for group in x.param_groups], x.state) for x in self.optimizers]
        try:
            for optimizer, _, state in kept:
                optimizer.state = copy.copy(state)
                optimizer.state.clear()
                for group in optimizer.param_groups:
                    old, group["params"] = group["params"], [parameters[self._names[id(x)]] for x in group["params"]]
                    pairs = zip(old, group["params"], strict=True)
                    optimizer.state.update({own: dict(state[x]) for x, own in pairs if x in state})
            for name, (optimizer, parameter, key) in self._slots.items():
                optimizer.state[parameters[self._names[id(parameter)]]][key] = given[name]
            before = self._beside()
            yield
            self._look_at_the_end(given, parameters, before)
        finally:
            for optimizer, groups, state in kept:
                optimizer.state = state
                for group, own in zip(optimizer.param_groups, groups, strict=False):
                    group.clear()
                    group.update(own)

    def _look_at_the_end(self, given: Mapping[str, Tensor], parameters: Mapping[str, Tensor], before: Any) -> None:
        names = {id(x): name for name, x in parameters.items()}
        self.new = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"{OPTIMIZER}{names[id(parameter)]}.{key}"
                    if isinstance(value, Tensor) and given.get(name) is not value:
                        self.new[name] = value
        self.host_side = changed_beside(before, self._beside())

    def _beside(self) -> dict[str, str]:
        """The optimizers' state that is not tensors, in words."""
        found: dict[str, str] = {}
        for number, optimizer in enumerate(self.optimizers):
            found |= {f"optimizer {number} {key}": repr(x) for key, x in vars(optimizer).items() if _is_plain(x)}
            for place, group in enumerate(optimizer.param_groups):
                found |= {f"optimizer {number} group {place} {k}": repr(x) for k, x in group.items() if k != "params"}
            for place, state in enumerate(optimizer.state.values()):
                others = {k: repr(x) for k, x in state.items() if not isinstance(x, Tensor)}
                found |= {f"optimizer {number} parameter {place} {k}": x for k, x in others.items()}
        return found


def kept_beside(modules: Mapping[str, nn.Module]) -> dict[str, str | _This]:
    """What modules keep that is no parameter, buffer or module: numbers and texts, in words, and which tensors."""
    parts = [(f"{prefix}{name}", part) for prefix, module in modules.items() for name, part in module.named_modules()]
    return {f"module {name}.{key}".replace(" .", " "): _told(x) for name, part in parts for key, x in _own(part)}


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes, those in lists and dictionaries among them, but for what every module has."""
    for key, x in vars(module).items():
        if key in _OF_EVERY_MODULE:
            continue
        items = enumerate(x) if isinstance(x, list | tuple) else x.items() if isinstance(x, dict) else ()
        yield from ((f"{key}[{place}]", item) for place, item in items if _is_plain(item) or isinstance(item, Tensor))
        if _is_plain(x) or isinstance(x, Tensor):
            yield key, x


_OF_EVERY_MODULE = {*vars(nn.Module())} - {"training"}


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, int | float | str)


@dataclass(frozen=True, eq=False)
class _This:
    """A tensor, which equals itself alone; held, as the next one may lie where one was that is gone."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and self.tensor is other.tensor

    __hash__ = None  # type: ignore[assignment]


def _told(x: Any) -> str | _This:
    return _This(x) if isinstance(x, Tensor) else repr(x)


def changed_beside(before: Mapping[str, str | _This], after: Mapping[str, str | _This]) -> list[str]:
    """The names whose values differ, or that one side lacks."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
