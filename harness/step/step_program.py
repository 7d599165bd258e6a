"""A step as a list of calls over versioned values, with the memory of each value.

1. A value is a node with a version, as calls may write it in place. After `z = x.add_(y)`, both x and z mean version 1
   of x.
2. The memory of a value is a set of pieces, each with a key. Views share pieces.
3. Nested graphs are followed too, if their inputs can be matched with the operands of the call.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import ScriptObject
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.operators.happens_before import NEVER_FREED, Key
from bitproof.harness.step.effects import Effects, PeerMessage, effects_of
from bitproof.harness.step.nested import body_of, chooses_by_data, graphs_of, operands_of
from bitproof.harness.torch_compat import OpOverload

Memory = tuple[Key, ...]
"""The keys of the pieces of memory that a value may use."""
ResultMemory = Memory | Mapping[Any, Any]
"""A value's memory. For a call with several results: the memory of each result, by its index."""


class Value(NamedTuple):
    """A value of a step: the result of a node after a number of writes in place."""

    node: Node
    version: int


class LocatedCall(NamedTuple):
    """A call and its location in the graph.

    - `where`: a description of the nested graph that contains the call; "" for the outermost graph.
    - `message`: the message, if this stands for a single message that the call starts; None for the call itself.
    """

    node: Node
    where: str = ""
    message: PeerMessage | None = None

    def __str__(self) -> str:
        return self.node.name


@dataclass(slots=True, eq=False)
class StepCall:
    """A call of a step, with the memory that it uses. A graph's output is a call that reads the results.

    - `where`: a description of the nested graph that contains the call; "" for the outermost graph.
    - `time`: a counter of the calls.
    - `effects`: the effects on the memory of the arguments; None for an output, and for a call that only runs the graph
      in `bodies`.
    - `held`: the memory of each node's result.
    - `uses`: the memory of all inputs.
    - `bodies`: the calls of each nested graph that the call runs.
    - `chooses`: whether data decide which of the bodies run, or how often.
    """

    node: Node
    where: str
    time: float
    effects: Effects | None
    held: Mapping[Node, ResultMemory]
    uses: Memory
    bodies: Sequence[Sequence[StepCall]] = ()
    chooses: bool = False

    @property
    def at(self) -> LocatedCall:
        return LocatedCall(self.node, self.where)

    @property
    def memory(self) -> ResultMemory:
        """The memory of the result."""
        return self.held[self.node]

    def memory_of(self, nodes: Iterable[Node]) -> Memory:
        """Return the memory of some of the call's inputs."""
        return flat([self.held[x] for x in nodes])


class StepProgram:
    """A graph as a list of calls. The constructor does all the work.

    - `calls`: the calls of the outermost graph, in order. The last is the graph's output.
    - `made`: for each piece of memory, the call that allocated it.
    - `kept`: the memory that is not freed during the step: inputs, constants and results.
    - `last_use`: for each piece of memory, the time of the last call that uses it; NEVER_FREED if it is kept.
    - `orders_streams`: whether a call names a stream, to switch to it or to wait for it.
    """

    def __init__(self, module: GraphModule) -> None:
        self.made: dict[Key, LocatedCall] = {}
        self.kept: set[Key] = set()
        self.last_use: dict[Key, float] = {}
        self.orders_streams = False
        # By (id of the graph's module, attribute): two references to a constant are the same memory.
        self._constants: dict[tuple[int, str], Memory] = {}
        # The written argument that a call returns, as in `y = x.add_(1)`: x, or what x itself returns.
        self._same: dict[Node, Node] = {}
        self._write_times: dict[Node, list[float]] = {}
        self._time = 0.0
        self.calls, _ = self._follow(module, None, "")
        self.last_use |= dict.fromkeys(self.kept, NEVER_FREED)

    def value(self, x: Node, time: float) -> Value:
        """Return the value that a node means for the call at `time`: the newest version before this call.

        Writes inside a nested graph make no new version of the graph's operands.
        """
        node = self._same.get(x, x)
        return Value(node, bisect.bisect_left(self._write_times.get(node, ()), time))

    def _follow(
        self, module: GraphModule, operands: Sequence[ResultMemory] | None, where: str
    ) -> tuple[list[StepCall], ResultMemory]:
        """Return the calls of a graph, and the memory of its results.

        - `operands`: for a nested graph, the memory of each input; None if it is unknown, or for the outermost graph.
        - `where`: a description of the nested graph; "" for the outermost graph.
        """
        given = iter(operands or ())
        held: dict[Node, ResultMemory] = {}
        calls: list[StepCall] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                held[node] = next(given, ()) if operands is not None else self._keep(LocatedCall(node, where))
            elif node.op == "get_attr":
                held[node] = self._constant(module, node, where)
            elif node.op == "output":
                if operands is None:
                    self._time += 1
                    uses = flat([held[x] for x in node.all_input_nodes])
                    self.kept |= {*uses}
                    calls.append(StepCall(node, where, self._time, None, held, uses))
                return calls, _structure(node.args[0] if node.args else None, held)
            else:
                calls.append(call := self._call(node, held, where))
                if call.effects is not None and call.effects.adopts is not None:
                    # `x.set_(y)`: from here on, x has y's memory. Earlier calls keep the old `held`.
                    own, other = call.effects.adopts
                    held = {**held, own: held[other]}
        return calls, ()

    def _constant(self, module: GraphModule, node: Node, where: str) -> Memory:
        key = (id(module), str(node.target))
        # A process group is no memory.
        if isinstance(getattr(module, str(node.target), None), ScriptObject):
            return ()
        if key not in self._constants:
            self._constants[key] = self._keep(LocatedCall(node, where))
        return self._constants[key]

    def _call(self, node: Node, held: dict[Node, ResultMemory], where: str) -> StepCall:
        bodies: Sequence[Sequence[StepCall]] = ()
        effects, chooses = None, False
        if not isinstance(node.target, OpOverload):
            if (body := body_of(node)) is not None:
                name = next((str(x.target) for x, _ in graphs_of(node)), str(node.target))
                operands = [_structure(argument, held) for argument in body[1]]
                calls, held[node] = self._follow(body[0], operands, f" (nested graph {name})")
                bodies = [calls]
            else:
                # Branches of a data-dependent call, or nested graphs whose inputs may not be the call's operands.
                chooses = chooses_by_data(node)
                bodies = [self._branch(node, x, graph, held) for x, graph in graphs_of(node)]
        # Behind the nested graphs, as the operands are in use until they have run.
        time = self._time = self._time + 1
        uses = flat([held[x] for x in node.all_input_nodes])
        for key in uses:
            self.last_use[key] = time
        if node not in held:
            effects = effects_of(node)
            held[node] = held[effects.adopts[1]] if effects.adopts else self._result(node, effects, held, where)
            self.orders_streams |= effects.row.sync is not None
            if effects.writes:
                self._write(node, effects)
        return StepCall(node, where, time, effects, held, uses, bodies, chooses)

    def _write(self, node: Node, effects: Effects) -> None:
        written = dict.fromkeys(self._same.get(x, x) for x in effects.writes)
        for x in written:
            self._write_times.setdefault(x, []).append(self._time)
        if effects.shares and effects.shares[0] is effects.writes[0]:
            self._same[node] = next(iter(written))

    def _branch(
        self, node: Node, reference: Node, graph: GraphModule, held: Mapping[Node, ResultMemory]
    ) -> list[StepCall]:
        operands = operands_of(node, graph)
        given = None if operands is None else [_structure(operand, held) for operand in operands]
        return self._follow(graph, given, f" (nested graph {reference.target})")[0]

    def _result(self, node: Node, effects: Effects, held: Mapping[Node, ResultMemory], where: str) -> ResultMemory:
        # An item of a call with several results has the memory of that result alone.
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            parent = held[node.args[0]]
            if isinstance(parent, Mapping):
                return parent.get(node.args[1], flat([parent]))
        # A call with several messages returns their tensors, in the order of its messages.
        each = {place: held[message.tensor] for place, message in enumerate(effects.messages)} or ()
        if effects.is_behind_token:
            return self._behind_token(LocatedCall(node, where), effects, held) if len(each) < 2 else {0: (), 1: each}
        if effects.shares and len(each) > 1:
            return each
        if effects.shares:
            found = [held[x] for x in effects.shares]
            return found[0] if len(found) == 1 else flat(found)
        if not effects.gives_several:
            return self._new(LocatedCall(node, where))
        taken = (user.args[1] for user in node.users if user.target is operator.getitem)
        places = [place for place in taken if isinstance(place, int)]
        # None stands for all results that no call takes by index.
        return {place: self._new(LocatedCall(node, where)) for place in dict.fromkeys([*places, None])}

    def _behind_token(
        self, at: LocatedCall, effects: Effects, held: Mapping[Node, ResultMemory]
    ) -> Mapping[Any, ResultMemory]:
        # Result 0 is the token, without memory. The others are the results of the operator that the call runs.
        taken = [x.args[1] for x in at.node.users if x.target is operator.getitem and isinstance(x.args[1], int)]
        places = [place for place in dict.fromkeys(taken) if place > 0]
        if effects.shares:
            shared = flat([held[x] for x in effects.shares])
            return {0: ()} | dict.fromkeys([*places, None], shared)
        if not effects.gives_several:
            return {0: ()} | dict.fromkeys([*places, None], self._new(at))
        return {0: ()} | {place: self._new(at) for place in [*places, None]}

    def _new(self, at: LocatedCall) -> Memory:
        self.made[key := len(self.made)] = at
        return (key,)

    def _keep(self, at: LocatedCall) -> Memory:
        memory = self._new(at)
        self.kept |= {*memory}
        return memory


def flat(values: Sequence[ResultMemory]) -> Memory:
    """Return the keys of all pieces of memory of some values, each key once."""
    if len(values) == 1 and isinstance(values[0], tuple):
        return values[0]
    found: list[Key] = []
    for value in values:
        found.extend(value if isinstance(value, tuple) else flat([*value.values()]))
    return tuple(found) if len(found) < 2 else tuple(dict.fromkeys(found))


def _structure(argument: Any, held: Mapping[Node, ResultMemory]) -> ResultMemory:
    """Return the memory of an argument. For a list or a tuple: a dict with the memory of each item, by its index."""
    if isinstance(argument, Node):
        return held[argument]
    if isinstance(argument, (list, tuple)):
        return {place: _structure(part, held) for place, part in enumerate(argument)}
    if isinstance(argument, dict):
        found: list[ResultMemory] = []
        map_arg(argument, lambda node: found.append(held[node]))
        return flat(found)
    return ()
