"""Races in a finished graph: what reads the result of a collective or of a copy to or from host memory, or writes or
frees what it reads, before anything waited for it.

Where ranks meet in shared memory, or a machine has nothing else to do, such a graph may compute the right bits every
time; on a GPU it reads what a stream is still writing. So equal bits of it show nothing.

1. Write down what each call reads, writes, launches and waits for, with the memory in which values lie. Graphs that are
   called within the graph are followed into, where it is known which operand is which of their inputs.
2. Follow the calls in their order (`harness.operators.flights`).

The graph may be anybody's: besides operators it may call methods, modules and functions, of which names tell what they
do. What is not known reads all that it is handed, and shares memory with none of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.graph import operators
from bitproof.harness.operators import Launch, Operator, Wait
from bitproof.harness.operators.flights import NEVER_FREED, Flights
from bitproof.harness.torch_compat import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of, storage_key

MOST_TOLD = 3

Memory = frozenset[Hashable]
"""The pieces of memory in which a value may lie."""
Held = Memory | Mapping[Any, Any]
"""A value's memory; of several results, that of each by its place."""

NOWHERE: Memory = frozenset()


def races(module: GraphModule) -> list[str]:
    """A line for each call that races with what is on its way, in the graph's order; of many the first few, and how
    many more."""
    walk = _Walk()
    walk.take(module, None, "")
    found = list(dict.fromkeys(walk.races()))
    left = len(found) - MOST_TOLD
    return [*found[:MOST_TOLD], *([f"and {left} more"] if left > 0 else [])]


@dataclass(frozen=True)
class _Event:
    """One call, as far as memory goes. `results` are those of a launch, each in memory of its own."""

    name: str
    told: str
    where: str
    reads: Memory
    writes: Memory
    handed: Memory
    launch: Launch | None = None
    wait: Wait | None = None
    results: tuple[Memory, ...] = ()
    awaited: Memory = NOWHERE


@dataclass
class _Walk:
    """The events of a graph and of those that it calls, in their order."""

    events: list[_Event] = field(default_factory=list)
    kept: set[Hashable] = field(default_factory=set)
    calls: int = 0

    def races(self) -> Iterator[str]:
        """What follows of the events."""
        if not any(event.launch for event in self.events):
            return
        last_use: dict[Hashable, float] = {key: time for time, event in enumerate(self.events) for key in event.handed}
        flights = Flights(last_use | dict.fromkeys(self.kept, NEVER_FREED))
        for time, event in enumerate(self.events):
            found = flights.races(event.reads, event.writes)
            if event.wait is not None:
                found += flights.wait(event.wait, event.awaited, time)
            if event.launch is not None:
                flights.launch(event.name, time, event.launch, event.results, event.reads)
            yield from (race.told(event.told) + event.where for race in found)

    def take(self, module: GraphModule, operands: Sequence[Held] | None, where: str) -> Held:
        """Write down a graph's events; gives the memory of what it returns. A caller's operands lie where they lie."""
        self.calls += 1
        frame = self.calls
        given = iter(operands or ())
        held: dict[Node, Held] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                held[node] = next(given, NOWHERE) if operands is not None else self._kept((frame, node))
            elif node.op == "get_attr":
                held[node] = self._kept((id(node.graph.owning_module), str(node.target)))
            elif node.op == "output":
                if operands is None:
                    read = _flat(_held_of(node.args, held))
                    self.kept |= read
                    self._add(node, "the step's result", where, reads=read, handed=read)
                return _structure(node.args[0] if node.args else None, held)
            elif not isinstance(node.target, OpOverload) and (body := _body(node)) is not None:
                inner, arguments = body
                name = str(node.target) if node.op == "call_module" else str(node.all_input_nodes[0].target)
                handed = _flat([held[x] for x in node.all_input_nodes])
                operands_of = [_structure(argument, held) for argument in arguments]
                held[node] = self.take(inner, operands_of, f" (nested graph {name})")
                self._add(node, f"`{node.name}`", where, handed=handed)
            else:
                held[node] = self._call(node, held, frame, where)
        return NOWHERE

    def _kept(self, key: Hashable) -> Memory:
        self.kept.add(key)
        return frozenset([key])

    def _call(self, node: Node, held: Mapping[Node, Held], frame: int, where: str) -> Held:
        """Write down one call; gives the memory of its result."""
        if not isinstance(node.target, OpOverload):
            for x in node.all_input_nodes:
                if (body := operators.graph_of(x)) is not None:  # which operand is which input of it is not known
                    self.take(body, None, f" (nested graph {x.target})")
        effects = _effects(node)
        handed = _flat([held[x] for x in node.all_input_nodes])
        written = _flat([held[x] for x in effects.writes])
        reads = NOWHERE if effects.only_shows else handed
        result = self._result(node, effects, held, frame)
        launch = effects.row.launch
        self._add(
            node,
            f"`{node.name}`",
            where,
            reads=reads,
            writes=written,
            handed=handed,
            launch=launch,
            wait=effects.row.wait,
            results=_parts(result) if launch else (),
            awaited=_flat([held[x] for x in effects.awaits]),
        )
        return result

    def _result(self, node: Node, effects: _Effects, held: Mapping[Node, Held], frame: int) -> Held:
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            parent = held[node.args[0]]
            if isinstance(parent, Mapping):
                return parent.get(node.args[1], _flat([parent]))
        if effects.shares:
            found = [held[x] for x in effects.shares]
            return found[0] if len(found) == 1 and isinstance(found[0], Mapping) else _flat(found)
        if not effects.gives_several:
            return frozenset([(frame, node)])
        taken = (user.args[1] for user in node.users if user.target is operator.getitem)
        places = [place for place in taken if isinstance(place, int)]
        return {place: frozenset([(frame, node, place)]) for place in dict.fromkeys([*places, None])}

    def _add(
        self,
        node: Node,
        told: str,
        where: str,
        *,
        reads: Memory = NOWHERE,
        writes: Memory = NOWHERE,
        handed: Memory = NOWHERE,
        **known: Any,
    ) -> None:
        self.events.append(_Event(node.name, told, where, reads, writes, handed, **known))


# -- where values lie -------------------------------------------------------------------------------


def _flat(values: Iterable[Held]) -> Memory:
    """All memory in which any of these values lies."""
    found: set[Hashable] = set()
    for value in values:
        found |= _flat(value.values()) if isinstance(value, Mapping) else value
    return frozenset(found)


def _parts(value: Held) -> tuple[Memory, ...]:
    return tuple(_flat([part]) for part in value.values()) if isinstance(value, Mapping) else (value,)


def _structure(argument: Any, held: Mapping[Node, Held]) -> Held:
    """The memory of an argument: of a list or tuple, that of each of its parts."""
    if isinstance(argument, Node):
        return held[argument]
    if isinstance(argument, (list, tuple)):
        return {place: _structure(part, held) for place, part in enumerate(argument)}
    return NOWHERE


def _held_of(arguments: Any, held: Mapping[Node, Held]) -> list[Held]:
    """The memory of every node among arguments."""
    found: list[Held] = []
    map_arg(arguments, lambda node: found.append(held[node]))
    return found


def _body(node: Node) -> tuple[GraphModule, Sequence[Any]] | None:
    """The graph that a call runs, and what it is handed for each of its inputs, where that is known."""
    if node.op == "call_module":
        module = _submodule(node)
        if not isinstance(module, GraphModule):
            return None
        names = [str(x.target) for x in module.graph.nodes if x.op == "placeholder"]
        return module, [*node.args, *(node.kwargs[name] for name in names[len(node.args) :] if name in node.kwargs)]
    return operators.nested_call(node) if node.op == "call_function" else None


def _submodule(node: Node) -> nn.Module | None:
    owner = node.graph.owning_module
    try:
        return owner.get_submodule(str(node.target)) if owner is not None else None
    except AttributeError:
        return None


# -- what a call does to memory ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Effects:
    """What a call does to the memory of the nodes that it is handed.

    `only_shows`: it reads no element. `gives_several`: its results lie in memory of their own, each by itself.
    """

    row: Operator
    writes: Sequence[Node] = ()
    shares: Sequence[Node] = ()
    awaits: Sequence[Node] = ()
    only_shows: bool = False
    gives_several: bool = False


_ASSIGNING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_IN_PLACE_BY_NAME = frozenset(f"i{name}" for name in _ASSIGNING)


def _effects(node: Node) -> _Effects:
    if isinstance(node.target, OpOverload):
        return _effects_of(node, operators.row_of(node.target), [node.target])
    if node.op == "call_module":
        in_place = [*node.all_input_nodes[:1]] if getattr(_submodule(node), "inplace", False) is True else []
        return _Effects(Operator(name=str(node.target)), writes=in_place, shares=in_place)
    if node.target is operator.getitem:
        shown, place = node.all_input_nodes[:1], node.args[1]
        by_tensor = [x for x in node.all_input_nodes[1:] if not isinstance(x.meta.get("val"), _NUMBERS)]
        return _Effects(Operator(name="getitem"), shares=shown, only_shows=not by_tensor and not _selects(place))
    if node.target is operator.setitem:
        return _Effects(Operator(name="setitem"), writes=node.all_input_nodes[:1])
    if node.target is getattr:
        return _Effects(Operator(name="getattr"), shares=node.all_input_nodes[:1], only_shows=True)
    name = str(node.target) if node.op == "call_method" else operators.name_of(node.target)
    if getattr(node.target, "__module__", None) == "_operator" and name in _IN_PLACE_BY_NAME:
        return _Effects(Operator(name=name), writes=node.all_input_nodes[:1], shares=node.all_input_nodes[:1])
    if node.kwargs.get("inplace") is True:
        return _Effects(Operator(name=name), writes=node.all_input_nodes[:1], shares=node.all_input_nodes[:1])
    row = operators.row_of(node.target)
    packet: Any = node.target
    if not isinstance(packet, OpOverloadPacket | HigherOrderOperator) and row.launch is None and row.wait is None:
        packet = getattr(torch.ops.aten, name, None)  # a method or function of torch does what its namesake does
        row = operators.row_of(packet) if packet is not None else row
    overloads = [getattr(packet, x) for x in packet.overloads()] if isinstance(packet, OpOverloadPacket) else []
    return _effects_of(node, row, overloads)


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _selects(place: Any) -> bool:
    """Whether an index copies what it selects: by lists or tensors, where numbers and slices only show."""
    places = place if isinstance(place, tuple) else (place,)
    return any(isinstance(x, (list, Tensor)) for x in places)


def _effects_of(node: Node, row: Operator, overloads: Sequence[Any]) -> _Effects:
    """What a call does by the schemas of an operator: of any of its overloads, where it is not told which runs."""
    writes: dict[Node, None] = {}
    shares: dict[Node, None] = {}
    several = False
    for overload in overloads:
        writes |= dict.fromkeys(_named(node, overload, operators.written_names(overload)))
        shares |= dict.fromkeys(_named(node, overload, operators.aliased_names(overload)))
        several |= len(overloads) == 1 and _gives_several(overload)
    if row.returns is not None:
        shares |= dict.fromkeys(_named(node, overloads[0], (row.returns,)) if overloads else node.all_input_nodes[:1])
    if row.writes is not None and overloads:
        writes |= dict.fromkeys(_named(node, overloads[0], (row.writes,)))
    awaits: list[Node] = []
    if row.wait is not None:
        awaits = _named(node, overloads[0], (row.wait.argument,)) if overloads else node.all_input_nodes[:1]
    shows = bool(shares) and not (row.may_copy and _copied(node, next(iter(shares))))
    return _Effects(
        row,
        writes=list(writes),
        shares=list(shares),
        awaits=awaits,
        only_shows=row.wait is not None or row.reads_layout or (shows and not writes and row.launch is None),
        gives_several=several and not shares,
    )


def _named(node: Node, overload: Any, names: Sequence[str]) -> list[Node]:
    """The nodes that a call hands on under these names of an overload."""
    if not names:
        return []
    declared = [argument.name for argument in schema_of(overload).arguments if not argument.kwarg_only]
    given = dict(zip(declared, node.args, strict=False)) | node.kwargs
    found: list[Node] = []
    map_arg([given.get(name) for name in names], found.append)
    return found


@functools.cache
def _gives_several(overload: Any) -> bool:
    returns = schema_of(overload).returns
    return len(returns) > 1 or any(str(x.type).startswith("List[") for x in returns)


def _copied(node: Node, source: Node) -> bool:
    """Whether a call that shows its argument where it can has copied it: where the values of both are known, by where
    they lie; else it may have."""
    own, shown = node.meta.get("val"), source.meta.get("val")
    if not (isinstance(own, Tensor) and isinstance(shown, Tensor)):
        return True
    return storage_key(own) != storage_key(shown)
