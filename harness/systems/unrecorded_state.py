"""Finds state that a user's system keeps between steps but does not report in any record.

The search covers buffers, optimizer state and random generators of the models and optimizers in the factory's result:
in its attributes, in a function's closure, and in lists in these. State is reported if steps have changed it, and no
record has its name or its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bitproof.harness.capture.digest import digest, plain
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Record


class UnrecordedState:
    """The state of a system before its first step, to find out later which state has changed."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._before = self._digests()

    def unshown(self, rows: Mapping[Key, Record]) -> list[str]:
        # A system may record a state under another name, so a record with the same value counts, too.
        names = {key.name.partition("@")[0] for key in rows}
        values = {record.digest for record in rows.values()}
        return [
            label
            for label, value in self._digests().items()
            if value != self._before.get(label) and value not in values and label.partition(" ")[2] not in names
        ]

    def _digests(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for label, tensor in _states(_models_and_optimizers(self._made)):
            try:
                found[label] = digest(plain(tensor.detach()))
            except (RecordingError, RuntimeError):  # a tensor without values cannot be compared
                continue
        return found


def _models_and_optimizers(made: Any) -> list[Any]:
    # A recursive function is in its own closure.
    closure = [
        cell.cell_contents for cell in getattr(made, "__closure__", None) or () if cell.cell_contents is not made
    ]
    owner = getattr(made, "__self__", None)
    places = [*getattr(made, "__dict__", {}).values(), *closure, *getattr(owner, "__dict__", {}).values()]
    spread = [x for place in places for x in (place if isinstance(place, (list, tuple)) else [place])]
    # By id, as an object may be in several places, such as a closure and an attribute.
    return list({id(x): x for x in spread if isinstance(x, (nn.Module, Optimizer))}.values())


def _states(held: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    held = list(held)
    models = [each for each in held if isinstance(each, nn.Module)]
    names = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
    for model in models:
        yield from ((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
        for name, module in model.named_modules():
            yield from _generators(module, name)
    for optimizer in (each for each in held if isinstance(each, Optimizer)):
        yield from _generators(optimizer, type(optimizer).__name__)
        for number, (parameter, state) in enumerate(getattr(optimizer, "state", {}).items()):
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {names.get(id(parameter), f'parameter {number}')}.{key}", value


def _generators(holder: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute, value in vars(holder).items():
        if isinstance(value, torch.Generator):
            # The name of the outermost module is empty.
            yield f"rng {name}.{attribute}".replace(" .", " "), value.get_state()
