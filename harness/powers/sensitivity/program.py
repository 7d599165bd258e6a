"""A step as a list of calls over numbered values: the nodes of a graph, then the calls of the optimizer's update.

The number of a value is called its slot. A call that writes an argument in place makes a value with a new slot. For
example, `x.add_(y)` reads slot 3 and fills slot 7; from then on, `x` means slot 7. No value is lost, so any call can be
repeated at any time. A step is refused if it writes memory and later reads an older view of this memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from bitproof.harness.case import Kind
from bitproof.harness.errors import PassError
from bitproof.harness.graph import offload_operators, operators
from bitproof.harness.graph.groups import Partition
from bitproof.harness.graph.observation import activation, observed
from bitproof.harness.localize.logs.calls import CallSite
from bitproof.harness.localize.logs.node_call_sites import place_of
from bitproof.harness.step.step_program import StepProgram, Value
from bitproof.harness.torch_compat import HigherOrderOperator, OpOverload

PARAM, BUFFER, STATE, INPUT = "param", "buffer", "optimizer", "input"
"""Kinds of values that exist before a step: parameters, buffers, optimizer state and the batch."""

Source = tuple[str, str]
"""Kind and name of a value that exists before the step."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder among a recorded call's arguments, for the value with this number."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedCall:
    """An operator call of a step that can be repeated. A slot is the number of a value.

    - `result`: slot of the return value.
    - `writes`: for each argument that the call writes, its slot before and after the call.
    - `reads`: slots of all values that the call reads.
    - `partition`: for a collective, the ranks of its groups.
    - `counts`: False for calls that compute nothing, such as an item of a tuple, a wait, a size or a check.
    """

    index: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: int
    writes: tuple[tuple[int, int], ...] = ()
    reads: tuple[int, ...] = ()
    partition: Partition | None = None
    is_wait: bool = False
    counts: bool = True
    operator: str
    node: str
    place: CallSite

    @property
    def operator_namespace(self) -> str:
        return str(getattr(self.function, "namespace", ""))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slots (numbers) of the values that the call makes: its result, and new values of written arguments."""
        return (self.result, *(new for _, new in self.writes))


@dataclass
class Program:
    """A step as a list of calls that read and make values. The number of a value is its slot.

    - `inputs`: slot of each value that exists before the step, such as a parameter.
    - `last`: slots of the same values after the step.
    - `compared`: (kind, name) of each record -> slot, in the order of recording.
    """

    calls: list[ReplayedCall] = field(default_factory=list)
    inputs: dict[Source, int] = field(default_factory=dict)
    last: dict[Source, int] = field(default_factory=dict)
    compared: dict[tuple[Kind, str], int] = field(default_factory=dict)
    num_slots: int = 0

    def slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def input(self, source: Source) -> int:
        """Return the slot (number) of a value that exists before the step, such as ("param", "embed.weight").

        The first call for a value gives the value its slot.
        """
        if source not in self.inputs:
            self.inputs[source] = self.last[source] = self.slot()
        return self.inputs[source]

    def add(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], **others: Any
    ) -> ReplayedCall:
        """Add a call that reads the slots among its arguments and makes a new slot. `others` are its further fields."""
        reads = tuple(sorted(set(slots_in([args, kwargs]))))
        index, result = len(self.calls), self.slot()
        call = ReplayedCall(
            index=index, function=function, args=args, kwargs=kwargs, result=result, reads=reads, **others
        )
        self.calls.append(call)
        return call

    @functools.cached_property
    def readers(self) -> list[list[int]]:
        """For each slot (value number), the indices of the calls that read the value, in order."""
        found: list[list[int]] = [[] for _ in range(self.num_slots)]
        for call in self.calls:
            for slot in call.reads:
                found[slot].append(call.index)
        return found

    @functools.cached_property
    def makers(self) -> dict[int, ReplayedCall]:
        """Slot (value number) -> the call that makes the value. Inputs of the step are missing."""
        return {slot: call for call in self.calls for slot in call.outputs}

    @functools.cached_property
    def shown(self) -> dict[int, Kind]:
        """Slot (value number) -> kind of record, for each value that is compared."""
        # Reversed, so that a slot with several records keeps the kind of the first.
        return {slot: kind for (kind, _), slot in reversed(self.compared.items())}

    def targets(self, call: ReplayedCall) -> list[int]:
        """Return the slots (value numbers) of a call's results, without results that nothing reads or compares.

        For a tuple, these are the slots of its items.
        """
        found: list[int] = []
        for slot in call.outputs:
            readers = [self.calls[index] for index in self.readers[slot]]
            # A tuple itself cannot be made wrong, only its elements.
            if readers and all(reader.function is operator.getitem for reader in readers):
                found += [reader.result for reader in readers]
            else:
                found.append(slot)
        return [slot for slot in dict.fromkeys(found) if self.readers[slot] or slot in self.shown]


def slots_in(value: Any) -> Iterable[int]:
    match value:
        case Slot(number):
            yield number
        case list() | tuple():
            for item in value:
                yield from slots_in(item)
        case dict():
            yield from slots_in(list(value.values()))


def filled(value: Any, get: Callable[[int], Any]) -> Any:
    """Replace each `Slot` in nested arguments by its value, and return the result. `get` takes a slot's number."""
    kind = type(value)
    if kind is Slot:
        return get(value.number)
    if kind is tuple:
        return tuple([filled(item, get) for item in value])
    if kind is list:
        return [filled(item, get) for item in value]
    return value


def add_graph(
    program: Program,
    module: GraphModule,
    sources: Sequence[Source],
    returned: Sequence[tuple[Kind, str]],
    partitions: Mapping[str, Partition],
) -> None:
    """Add the calls of a graph to a program.

    - `sources`: kind and name of each input.
    - `returned`: kind and name of each output's record.
    - `partitions`: name of a process group -> ranks of its groups.

    Raises PassError for a collective in an unknown group.
    """
    step = StepProgram(module)
    placeholders = dict(zip(sources, module.graph.find_nodes(op="placeholder"), strict=True))
    slots = {Value(node, 0): program.input(source) for source, node in placeholders.items()}

    def slot_at(time: float, x: Node) -> int:
        return slots[step.value(x, time)]

    for call in step.calls:
        node, slot = call.node, functools.partial(slot_at, call.time)
        if node.op == "output":
            program.compared |= {name: slot(x) for name, x in zip(returned, node.args[0], strict=True)}  # type: ignore[arg-type]
            # After all calls: an input that was written means its newest version.
            program.last |= {source: slot(x) for source, x in placeholders.items()}
        elif node.target is observed:
            _add_observed(program, node, slot)
        else:
            args, kwargs = _with_slots((tuple(node.args), dict(node.kwargs)), slot, module)
            written = [step.value(x, call.time) for x in call.effects.writes] if call.effects else []
            writes = {value: (slots[value], program.slot()) for value in dict.fromkeys(written)}
            slots |= {Value(x, version + 1): new for (x, version), (_, new) in writes.items()}
            is_collective = operators.is_collective(node)
            if is_collective and operators.group_name(node) not in partitions:
                raise PassError("a collective names an unknown process group", found=operators.group_name(node))
            made = program.add(
                node.target,  # type: ignore[arg-type]
                args,
                kwargs,
                writes=tuple(writes.values()),
                partition=partitions[operators.group_name(node)] if is_collective else None,
                is_wait=operators.is_wait(node),
                counts=_counts(node),
                operator=operators.operator_name(node),
                node=node.name,
                place=place_of(node)[0],
            )
            # The result of `x.add_(1)` has a slot, too, but later calls read the new version of x.
            slots[Value(node, 0)] = made.result


def _add_observed(program: Program, node: Node, slot: Callable[[Node], int]) -> None:
    """Add an observed activation to the values that records compare.

    If the activation is concatenated or sliced from several values, also add a call that makes it from them.
    """
    name, parts, dim, piece = node.args
    slots = [slot(part) for part in parts]  # type: ignore[union-attr, arg-type]
    key: tuple[Kind, str] = ("activation", str(name))
    if len(slots) == 1 and piece is None:
        program.compared[key] = slots[0]
        return
    args = ([Slot(number) for number in slots], dim, piece)
    place, _ = place_of(parts[0])  # type: ignore[index, arg-type]
    made = program.add(activation, args, {}, counts=False, operator="observed", node=node.name, place=place)
    program.compared[key] = made.result


def _with_slots(value: Any, slot: Callable[[Node], int], module: GraphModule) -> Any:
    match value:
        # An attribute of the module: a constant or a nested graph.
        case Node(op="get_attr"):
            return functools.reduce(getattr, str(value.target).split("."), module)
        case Node():
            return Slot(slot(value))
        case list():
            return [_with_slots(item, slot, module) for item in value]
        case tuple():
            return tuple([_with_slots(item, slot, module) for item in value])
        case dict():
            return {name: _with_slots(item, slot, module) for name, item in value.items()}
    return value


def _counts(node: Node) -> bool:
    if not isinstance(node.target, (OpOverload, HigherOrderOperator)) or node.target in offload_operators.WAITS:
        return False
    return not (operators.is_wait(node) or operators.is_check(node) or operators.operator_name(node) == "sym_size")
