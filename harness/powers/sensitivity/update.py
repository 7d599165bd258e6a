"""Records the operator calls of a trainer's update (optimizer and buffers) as part of a program.

All ranks make the same calls, so a single rank is recorded. Its tensors are restored afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bitproof.harness.errors import PassError
from bitproof.harness.graph.groups import Partition
from bitproof.harness.graph.operators import COLLECTIVE_NAMESPACES, name_of, written_names
from bitproof.harness.localize.logs.calls import CallSite
from bitproof.harness.powers.sensitivity.program import (
    BUFFER,
    PARAM,
    STATE,
    Program,
    ReplayedCall,
    Slot,
    Source,
)
from bitproof.harness.torch_compat import TorchDispatchMode
from bitproof.harness.torch_operators import schema_of

AT = CallSite(None, "update")


class Optimizer(Protocol):
    """The attributes of an optimizer that are used here."""

    def state(self) -> Any: ...


class TrainerLike(Protocol):
    """The attributes of a trainer that are used here; see `reference.step`."""

    parameters: Mapping[str, Any]
    state_buffers: Mapping[str, Tensor]
    model: Any
    optimizer: Any
    data: Any

    def update(self, gradients: Mapping[str, Tensor]) -> None: ...


def held(trainer: TrainerLike) -> dict[Source, Tensor]:
    buffers = dict(trainer.model.named_buffers())
    found: dict[Source, Tensor] = {(PARAM, name): x.detach() for name, x in trainer.parameters.items()}
    found |= {(BUFFER, name): x for name, x in buffers.items()}
    return found | {(STATE, name): x for name, x in trainer.optimizer.state()}


def begin_state(trainer: TrainerLike) -> None:
    """Create the optimizer state that a trainer's first update would create, and fill it with zeros.

    Parameters and buffers are unchanged.
    """
    # An update with zero gradients still changes parameters: weight decay does.
    before = [(x, x.detach().clone()) for x in held(trainer).values()]
    with _Tape(Program(), {}, runs_only=True):
        trainer.update(_zero_gradients(trainer))
    with torch.no_grad():
        for x, value in before:
            x.copy_(value)
        for _, x in trainer.optimizer.state():
            x.zero_()


def add_update(program: Program, trainer: TrainerLike, partitions: Mapping[str, Partition]) -> None:
    """Add the calls of a trainer's update to a program. The update runs once, then the trainer's tensors are restored.

    The calls read the program's gradients. Raises PassError if the update reads a tensor outside the trainer's state.
    """
    gradients = _zero_gradients(trainer)
    known = held(trainer)
    # The update below changes the rank's real state, so it is restored afterwards.
    before = [(x, x.clone()) for x in known.values()]
    tape = _Tape(program, partitions)
    for source, x in known.items():
        program.input(source)
        tape.know(x, program.last[source])
    for name, parameter in trainer.parameters.items():  # the optimizer passes the parameter itself
        tape.know(parameter, program.last[PARAM, name])
    for name, x in gradients.items():
        tape.know(x, program.compared["grad", name])
    with tape:
        trainer.update(gradients)
    for source, x in known.items():
        program.last[source] = tape.read(trainer.parameters[source[1]] if source[0] == PARAM else x)
    with torch.no_grad():
        for x, value in before:
            x.copy_(value)


def _zero_gradients(trainer: TrainerLike) -> dict[str, Tensor]:
    return {name: torch.zeros_like(x) for name, x in trainer.parameters.items()}


class _Tape(TorchDispatchMode):
    """Dispatch mode that adds each call to a program. With `runs_only`, it runs the calls without adding them."""

    def __init__(self, program: Program, partitions: Mapping[str, Partition], *, runs_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._program = program
        self._partitions = partitions
        self._runs_only = runs_only
        # The slot of each tensor's current value, by `id`. A parameter and its detached view have the same.
        self._slots: dict[int, int] = {}
        # Tensors are identified by `id`, which Python would reuse if they were freed.
        self._kept: list[Tensor] = []

    def know(self, x: Tensor, slot: int) -> None:
        self._slots[id(x)] = slot
        self._kept.append(x)

    def read(self, x: Tensor) -> int:
        if id(x) not in self._slots:
            raise PassError(
                "the update reads a tensor that is no part of what a rank holds between steps",
                expected="parameters, gradients, buffers and the optimizer's state",
                found=f"{x.dtype} of shape {tuple(x.shape)}",
            )
        return self._slots[id(x)]

    def _write(self, x: Tensor) -> tuple[int, int]:
        old, new = self.read(x), self._program.slot()
        self._slots |= {key: new for key, slot in self._slots.items() if slot == old}
        return old, new

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_collective = getattr(function, "namespace", None) in COLLECTIVE_NAMESPACES
        is_wait = is_collective and name_of(function) == "wait_tensor"

        def run() -> Any:
            # Not executed: the other ranks are not here, and only the shape of the result matters.
            return args[0] if is_wait else args[0].clone() if is_collective else function(*args, **kwargs)

        if self._runs_only or name_of(function).startswith("_record_function"):
            return run()
        # Arguments are frozen before the writes: the call reads the slots from before it.
        frozen = self._with_slots(tuple(args)), {name: self._with_slots(value) for name, value in kwargs.items()}
        written = [] if is_collective else self._written_tensors(function, args, kwargs)
        writes = tuple(self._write(x) for x in written)
        result = run()
        call = self._program.add(
            function,
            *frozen,
            writes=writes,
            partition=self._partitions[str(args[-1])] if is_collective and not is_wait else None,
            is_wait=is_wait,
            counts=not is_wait,
            operator=name_of(function),
            node="",
            place=AT,
        )
        # An in-place call returns the tensor that it wrote, which already has its new slot.
        if isinstance(result, Tensor) and not any(result is x for x in written):
            self.know(result, call.result)
        elif isinstance(result, (tuple, list)):
            for place, x in enumerate(result):
                self.know(x, self._element(call, place))
        return result

    def _element(self, call: ReplayedCall, place: int) -> int:
        # The element is a call of `getitem`, as in a graph.
        args = Slot(call.result), place
        return self._program.add(operator.getitem, args, {}, counts=False, operator="getitem", node="", place=AT).result

    def _with_slots(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Slot(self.read(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._with_slots(item) for item in value)
        return value

    def _written_tensors(self, function: Any, args: Any, kwargs: Any) -> list[Tensor]:
        names = [argument.name for argument in schema_of(function).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        values = [given.get(name) for name in written_names(function)]
        flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
        # By identity, each tensor once: tensors have no usable `==`.
        return list({id(x): x for x in flat if isinstance(x, Tensor)}.values())
