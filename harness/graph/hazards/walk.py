"""Follows a graph's calls in order, and finds the memory and the stream of each call.

1. A value's memory is a set of pieces, each with a key. Views share pieces. Nested graphs are followed too, if their
   inputs can be matched with the operands of the call.
2. A call runs on the current stream, or on the stream that the graph names. In a graph for CUDA, calls without GPU
   tensors run on the host.
3. Launches of collectives, and the waits for them, are recorded in order.

`harness.operators.happens_before` decides from memory and streams which calls race.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import ScriptObject
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.graph import operators
from bitproof.harness.graph.hazards.effects import Effects, PeerMessage, effects_of, submodule_of
from bitproof.harness.graph.hazards.value_devices import ON_CUDA, device_of, holds_up_host, is_for_cuda, places_of
from bitproof.harness.operators import Sync
from bitproof.harness.operators.happens_before import COMPUTE, HOST, NEVER_FREED, Key, Order, Race, Stream
from bitproof.harness.torch_compat import OpOverload
from bitproof.harness.torch_operators import schema_of

Memory = tuple[Key, ...]
"""The keys of the pieces of memory that a value may use."""
ResultMemory = Memory | Mapping[Any, Any]
"""A value's memory. For a call with several results: the memory of each result, by its index."""

BRANCHES_ON_DATA = ("cond", "while_loop")
"""Higher-order operators that choose by data which graph to run, or how often."""


@dataclass(frozen=True, slots=True)
class LocatedCall:
    """A call and its location in the graph.

    - `where`: a description of the nested graph that contains the call; "" for the outermost graph.
    - `message`: the message, if this stands for a single message that the call starts; None for the call itself.
    """

    node: Node
    where: str = ""
    message: PeerMessage | None = None

    def __str__(self) -> str:
        return self.node.name


@dataclass(frozen=True, slots=True)
class LaunchEntry:
    """A launch of a collective or a message, or a wait for such a launch.

    - `call`: the launch.
    - `waits`: the waiting call; None if this is the launch itself.
    - `choice`: the data-dependent call, such as `cond`, whose branch contains the launch or the wait; None outside
      branches.
    """

    call: LocatedCall
    waits: LocatedCall | None = None
    choice: LocatedCall | None = None


class GraphWalk:
    """Follows a graph call by call, and keeps the results. The constructor does all the work.

    - `races`: tuples (time, second call, race). The time is a counter of the calls that were followed.
    - `entries`: the launches of collectives and messages, and the waits for them, in order.
    - `last_use`: the time of the last use of each piece of memory.

    If given the `last_use` of an earlier walk, this walk also frees each piece of memory after its last use, and so
    detects memory that another stream reuses too early.
    """

    def __init__(self, module: GraphModule, last_use: Mapping[Key, float] | None = None) -> None:
        nodes = [node for m in module.modules() if isinstance(m, GraphModule) for node in m.graph.nodes]
        self.names_streams = any(
            operators.row_of(target).sync for target in {n.target for n in nodes if callable(n.target)}
        )
        self.names_streams |= any("stream" in (node.meta.get("custom") or ()) for node in nodes)
        self._has_cuda = is_for_cuda(module)
        # With a single stream and no host to wait for, calls run one after another: only launches can race with them.
        self._is_single = not (self.names_streams or self._has_cuda)
        self._order = Order(None, is_single=self._is_single)
        self._known_last_use = last_use
        self.last_use: dict[Key, float] = {}
        self.made: dict[Key, LocatedCall] = {}
        self.races: list[tuple[float, LocatedCall, Race]] = []
        self.entries: list[LaunchEntry] = []
        # Memory that is never freed during the step: inputs, constants and results.
        self._kept: set[Key] = set()
        # By (id of the graph's module, attribute): two references to a constant are the same memory.
        self._constants: dict[tuple[int, str], Memory] = {}
        self._places: dict[Node, int] = {}
        self._time = 0.0
        self._stream: Stream = COMPUTE
        self._choice: LocatedCall | None = None
        self._follow_graph(module, None, "")
        # Only now is it known when each piece of memory is last used, and so which launches outlive their source.
        last_uses = self.last_use | dict.fromkeys(self._kept, NEVER_FREED)
        self.races += [(time, who, race) for time, who, race in self._order.overdue(last_uses)]  # type: ignore[misc]
        self.last_use = last_uses

    def _follow_graph(self, module: GraphModule, operands: Sequence[ResultMemory] | None, where: str) -> ResultMemory:
        """Follow a graph, and return the memory of its results.

        - `operands`: for a nested graph, the memory of each input; None for the outermost graph.
        - `where`: a description of the nested graph; "" for the outermost graph.
        """
        given = iter(operands or ())
        held: dict[Node, ResultMemory] = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                held[node] = self._call(node, held, where)
            elif node.op == "placeholder":
                held[node] = next(given, ()) if operands is not None else self._keep(LocatedCall(node, where))
            elif node.op == "get_attr":
                key = (id(module), str(node.target))
                # A process group is no memory.
                if isinstance(getattr(module, str(node.target), None), ScriptObject):
                    self._constants[key] = ()
                if key not in self._constants:
                    self._constants[key] = self._keep(LocatedCall(node, where))
                held[node] = self._constants[key]
            elif node.op == "output":
                return self._finish_graph(node, held, where, is_last=operands is None)
            elif (body := _body(node)) is not None:
                inner, arguments = body
                name = next((str(x.target) for x in node.all_input_nodes if operators.graph_of(x)), str(node.target))
                operands_of = [_structure(argument, held) for argument in arguments]
                held[node] = self._follow_graph(inner, operands_of, f" (nested graph {name})")
                # The operands are in use until the whole nested graph has run.
                self._time += 1
                self._note_use(node.all_input_nodes, held)
            else:
                held[node] = self._call(node, held, where)
        return ()

    def _finish_graph(
        self, node: Node, held: Mapping[Node, ResultMemory], where: str, *, is_last: bool
    ) -> ResultMemory:
        # The caller of the step reads the results, on the computing stream or on the host: so the output counts as a
        # call that reads them. Nothing may be in flight after it.
        if is_last:
            read = _flat([held[x] for x in node.all_input_nodes])
            self._kept |= {*read}
            self._time += 1
            races = self._order.call(LocatedCall(node, where), read, (), COMPUTE)
            if self._has_cuda:
                on_host = [held[x] for x in node.all_input_nodes if device_of(x.meta.get("val")) == "cpu"]
                races += self._order.call(LocatedCall(node, where), _flat(on_host), (), HOST)
            self._add_races(LocatedCall(node, where), races)
            # Launches without a wait, except those that a race names already.
            known = {race.first for _, _, race in self.races}
            left = [] if where else self._order.unfinished(self._kept)
            self._add_races(LocatedCall(node, where), [race for race in left if race.first not in known])
        return _structure(node.args[0] if node.args else None, held)

    def _call(self, node: Node, held: dict[Node, ResultMemory], where: str) -> ResultMemory:
        if not isinstance(node.target, OpOverload):
            self._follow_graphs_of(node, held, where)
        self._time += 1
        effects = effects_of(node)
        row, inputs = effects.row, node.all_input_nodes
        self._note_use(inputs, held)
        if row.sync is not None:
            self._sync(node, row.sync, held)
        # Waits come before the call's own reads and writes: a call that waits may use the memory that it waited for.
        places = self._places_of(node, inputs) if self._has_cuda else 0
        stream = COMPUTE if self._is_single else self._stream_of(node, effects, places)
        if row.wait is not None:
            self._wait(LocatedCall(node, where), effects, held, stream)
        writes = _flat([held[x] for x in effects.writes]) if effects.writes else ()
        reads = () if effects.only_shows else _flat([held[x] for x in inputs])
        result = self._result(node, effects, held, where)
        if effects.adopts is not None:
            # `x.set_(y)`: from here on, x and the call's result are names for y's memory.
            own, other = effects.adopts
            held[own] = result = held[other]
        if effects.messages:
            self._send(LocatedCall(node, where), effects, held, result, stream)
        elif row.launch is not None:
            self._launch(LocatedCall(node, where), effects, reads, writes, result, stream)
        elif self._is_single:
            opened, freed = self._order.open, self._order.freed
            # Most calls run while nothing is in flight: this test is much cheaper than looking for races.
            if (opened or freed) and any(key in opened or key in freed for key in (*reads, *writes)):
                self._add_races(LocatedCall(node, where), self._order.races(reads, writes))
        elif places == ON_CUDA and not self.names_streams:  # only one stream uses this memory, and never the host
            if races := self._order.call_of_one(reads, writes, stream):
                self._add_races(LocatedCall(node, where), races)
            if effects.syncs_host:
                self._order.wait_stream(HOST, stream)
        else:
            # New memory counts as written: the allocator may reuse memory that another stream still uses.
            made = _flat([result]) if not effects.shares else ()
            self._add_races(
                LocatedCall(node, where), self._order.call(LocatedCall(node, where), reads, (*writes, *made), stream)
            )
            if stream != HOST and (effects.syncs_host or (self._has_cuda and holds_up_host(node))):
                self._order.wait_stream(HOST, stream)
        if effects.frees:
            self._order.report_freed(_flat([held[x] for x in effects.frees]), LocatedCall(node, where))
        if self._known_last_use is not None:
            self._free(LocatedCall(node, where), node, held)
        return result

    def _follow_graphs_of(self, node: Node, held: Mapping[Node, ResultMemory], where: str) -> None:
        # Branches of a data-dependent call, or nested graphs whose inputs may not be the call's operands.
        bodies = [(x, body) for x in node.all_input_nodes if (body := operators.graph_of(x)) is not None]
        if not bodies:
            return
        chooses, before = operators.name_of(node.target) in BRANCHES_ON_DATA, self._choice
        if chooses:
            # In nested choices, the outermost is named.
            self._choice = self._choice or LocatedCall(node, where)
        # Only one branch runs. So each starts from the same state, and afterwards only those launches have ended for
        # which all branches waited.
        ended: list[dict[int, Any]] = []
        for x, body in bodies:
            operands = _operands(node, body)
            given = None if operands is None else [_structure(operand, held) for operand in operands]
            state = self._order.state() if chooses else None
            self._follow_graph(body, given, f" (nested graph {x.target})")
            if state is not None:
                ended.append(self._order.go_back(state))
        everywhere = [work for key, work in ended[0].items() if all(key in other for other in ended)] if ended else []
        self._order.end(everywhere, self._stream)
        self._choice = before

    def _launch(
        self, call: LocatedCall, effects: Effects, reads: Memory, writes: Memory, result: ResultMemory, stream: Stream
    ) -> None:
        self._add_races(call, self._order.call(call, reads, writes, stream))
        assert effects.row.launch is not None
        self._order.launch(call, self._time, effects.row.launch, [x for x in _parts(result) if x], reads)
        if operators.launches_collective(call.node):
            self.entries.append(LaunchEntry(call, choice=self._choice))

    def _send(
        self,
        call: LocatedCall,
        effects: Effects,
        held: Mapping[Node, ResultMemory],
        result: ResultMemory,
        stream: Stream,
    ) -> None:
        assert effects.row.launch is not None
        sent = [each for each in effects.messages if each.is_sent]
        reads = _flat([held[each.tensor] for each in sent])
        writes = _flat([held[each.tensor] for each in effects.messages if not each.is_sent])
        self._add_races(call, self._order.call(call, reads, writes, stream))
        # A send fills no tensor: its wait completes the `Work` that the call returned, if it did.
        own = () if effects.shares else _flat([result])
        for message in effects.messages:
            # Each message is in flight until its own wait, so each is a launch.
            at, memory = LocatedCall(call.node, call.where, message), _flat([held[message.tensor]])
            fills, takes = (own, memory) if message.is_sent else (memory, ())
            self._order.launch(at, self._time, effects.row.launch, [fills], takes)
            self.entries.append(LaunchEntry(at, choice=self._choice))

    def _wait(self, call: LocatedCall, effects: Effects, held: Mapping[Node, ResultMemory], stream: Stream) -> None:
        awaited = _flat([held[x] for x in effects.awaits])
        for launch in self._order.filling(awaited):
            assert isinstance(launch, LocatedCall)
            if operators.launches_collective(launch.node):
                self.entries.append(LaunchEntry(launch, waits=call, choice=self._choice))
        assert effects.row.wait is not None
        self._order.wait(effects.row.wait, awaited, self._time, stream, call)

    def _result(self, node: Node, effects: Effects, held: Mapping[Node, ResultMemory], where: str) -> ResultMemory:
        # An item of a call with several results has the memory of that result alone.
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            parent = held[node.args[0]]
            if isinstance(parent, Mapping):
                return parent.get(node.args[1], _flat([parent]))
        # A call with several messages returns their tensors, in the order of its messages.
        each: ResultMemory = {place: held[message.tensor] for place, message in enumerate(effects.messages)}
        if effects.is_behind_token:
            return self._behind_token(node, effects, held, where) if len(each) < 2 else {0: (), 1: each}
        if effects.shares and len(each) > 1:
            return each
        if effects.shares:
            found = [held[x] for x in effects.shares]
            return found[0] if len(found) == 1 else _flat(found)
        if not effects.gives_several:
            return self._new(LocatedCall(node, where))
        taken = (user.args[1] for user in node.users if user.target is operator.getitem)
        places = [place for place in taken if isinstance(place, int)]
        # None stands for all results that no call takes by index.
        return {place: self._new(LocatedCall(node, where)) for place in dict.fromkeys([*places, None])}

    def _behind_token(
        self, node: Node, effects: Effects, held: Mapping[Node, ResultMemory], where: str
    ) -> ResultMemory:
        # Result 0 is the token, without memory. The others are the results of the operator that the call runs.
        taken = [x.args[1] for x in node.users if x.target is operator.getitem and isinstance(x.args[1], int)]
        places = [place for place in dict.fromkeys(taken) if place > 0]
        if effects.shares:
            shared = _flat([held[x] for x in effects.shares])
            return {0: ()} | dict.fromkeys([*places, None], shared)
        if not effects.gives_several:
            return {0: ()} | dict.fromkeys([*places, None], self._new(LocatedCall(node, where)))
        return {0: ()} | {place: self._new(LocatedCall(node, where)) for place in [*places, None]}

    def _new(self, call: LocatedCall) -> Memory:
        key = len(self.made)
        self.made[key] = call
        return (key,)

    def _keep(self, call: LocatedCall) -> Memory:
        memory = self._new(call)
        self._kept |= {*memory}
        return memory

    def _note_use(self, values: Sequence[Node], held: Mapping[Node, ResultMemory]) -> None:
        for x in values:
            memory = held[x]
            for key in memory if isinstance(memory, tuple) else _flat([memory]):
                self.last_use[key] = self._time

    def _add_races(self, call: LocatedCall, races: list[Race]) -> None:
        self.races += [(self._time, call, race) for race in races]

    # -- streams ----------------------------------------------------------------------------------------

    def _stream_of(self, node: Node, effects: Effects, places: int) -> Stream:
        current = (node.meta.get("custom") or {}).get("stream", self._stream) if self.names_streams else self._stream
        # Launches of collectives, and waits for them, run on the current stream on every device.
        if not self._has_cuda or effects.row.launch is not None or effects.row.wait is not None:
            return current
        return current if places & ON_CUDA else HOST

    def _places_of(self, node: Node, inputs: Sequence[Node]) -> int:
        known, found = self._places, 0
        for x in (node, *inputs):
            if (places := known.get(x)) is None:
                places = known[x] = places_of(x.meta.get("val"))
            found |= places
        return found

    def _sync(self, node: Node, sync: Sync, held: Mapping[Node, ResultMemory]) -> None:
        schema = schema_of(node.target)
        given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs
        # The arguments are the numbers of streams and events, except for KEEP, whose first argument is a tensor.
        first, *others = given.values()
        match sync:
            case Sync.SWITCH:
                self._stream = others[0]
            case Sync.RECORD:
                self._order.record(first, others[0])
            case Sync.WAIT_EVENT:
                self._order.wait_event(first, others[0])
            case Sync.WAIT_STREAM:
                self._order.wait_stream(first, others[0])
            case Sync.HOST_WAITS_EVENT:
                self._order.wait_event(first, HOST)
            case Sync.HOST_WAITS_STREAM:
                self._order.wait_stream(HOST, first)
            case Sync.HOST_WAITS:
                self._order.wait_stream(HOST, None)
            case Sync.KEEP:
                self._order.keep_for(_flat([held[first]]), others[0])

    def _free(self, call: LocatedCall, node: Node, held: Mapping[Node, ResultMemory]) -> None:
        assert self._known_last_use is not None
        in_use = dict.fromkeys(key for x in node.all_input_nodes for key in _flat([held[x]]))
        # Both walks count time in the same way, so the first walk's time of a last use is this call's time.
        gone = [key for key in in_use if self._known_last_use.get(key) == self._time]
        self._add_races(call, self._order.free(gone, call))


# -- memory of values ------------------------------------------------------------------------------


def _flat(values: Iterable[ResultMemory]) -> Memory:
    found: list[Key] = []
    for value in values:
        found.extend(value if isinstance(value, tuple) else _flat(value.values()))
    return tuple(found) if len(found) < 2 else tuple(dict.fromkeys(found))


def _parts(value: ResultMemory) -> list[Memory]:
    return [_flat([part]) for part in value.values()] if isinstance(value, Mapping) else [value]


def _structure(argument: Any, held: Mapping[Node, ResultMemory]) -> ResultMemory:
    """Return the memory of an argument. For a list or a tuple: a dict with the memory of each item, by its index."""
    if isinstance(argument, Node):
        return held[argument]
    if isinstance(argument, (list, tuple)):
        return {place: _structure(part, held) for place, part in enumerate(argument)}
    if isinstance(argument, dict):
        found: list[ResultMemory] = []
        map_arg(argument, lambda node: found.append(held[node]))
        return _flat(found)
    return ()


def _body(node: Node) -> tuple[GraphModule, Sequence[Any]] | None:
    """Return (the graph that a call runs, an operand for each of its inputs).

    Returns None if the call runs no graph or several graphs, or if the operands are not known.
    """
    if node.op == "call_module":
        module = submodule_of(node)
        if not isinstance(module, GraphModule):
            return None
        names = [str(x.target) for x in module.graph.nodes if x.op == "placeholder"]
        return module, [*node.args, *(node.kwargs[name] for name in names[len(node.args) :] if name in node.kwargs)]
    if (
        node.op != "call_function"
        or isinstance(node.target, OpOverload)
        or operators.name_of(node.target) in BRANCHES_ON_DATA
    ):
        return None
    if (call := operators.nested_call(node)) is not None:
        return call
    bodies = [body for x in node.all_input_nodes if (body := operators.graph_of(x)) is not None]
    operands = _operands(node, bodies[0]) if len(bodies) == 1 else None
    return None if operands is None else (bodies[0], operands)


def _operands(node: Node, body: GraphModule) -> list[Any] | None:
    """Return the operands for the inputs of the nested graph `body`: the arguments of `node` after its graphs.

    Returns None if their number is not the number of inputs.
    """
    places = [place for place, x in enumerate(node.args) if isinstance(x, Node) and operators.graph_of(x) is not None]
    if not places:
        return None
    operands: list[Any] = []
    # Operands come in a list or one by one. A string among them, such as a graph's name, is no operand.
    for argument in node.args[places[-1] + 1 :]:
        operands += argument if isinstance(argument, (list, tuple)) else [] if isinstance(argument, str) else [argument]
    count = sum(inner.op == "placeholder" for inner in body.graph.nodes)
    return operands if len(operands) == count else None
