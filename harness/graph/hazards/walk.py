"""Follows a step's calls in order, and finds the stream of each call.

1. A call runs on the current stream, or on the stream that the graph names. In a graph for CUDA, calls without GPU
   tensors run on the host.
2. Launches of collectives, and the waits for them, are recorded in order.

`harness.step.step_program` finds the memory of each call, and `harness.operators.happens_before` decides from memory
and streams which calls race.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.hazards.value_devices import ON_CUDA, device_of, holds_up_host, is_for_cuda, places_of
from bitproof.harness.operators import Sync
from bitproof.harness.operators.happens_before import COMPUTE, HOST, Order, Race, Stream
from bitproof.harness.step.effects import Effects
from bitproof.harness.step.step_program import LocatedCall, Memory, StepCall, StepProgram, flat


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

    - `step`: the graph's calls, with the memory of their values.
    - `races`: tuples (time, second call, race), with the time of the second call.
    - `entries`: the launches of collectives and messages, and the waits for them, in order.

    If the graph names streams, each piece of memory is freed after its last use. So the walk detects memory that
    another stream reuses too early.
    """

    def __init__(self, module: GraphModule) -> None:
        self.step = StepProgram(module)
        graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
        self._names_streams = self.step.orders_streams or any(
            "stream" in custom for graph in graphs for node in graph.nodes if (custom := node.meta.get("custom"))
        )
        self._has_cuda = is_for_cuda(module)
        # With a single stream and no host to wait for, calls run one after another: only launches can race with them.
        self._is_single = not (self._names_streams or self._has_cuda)
        self._order = Order(self.step.last_use, is_single=self._is_single)
        self.races: list[tuple[float, LocatedCall, Race]] = []
        self.entries: list[LaunchEntry] = []
        self._places: dict[Node, int] = {}
        self._stream: Stream = COMPUTE
        self._choice: LocatedCall | None = None
        # Races of launches that outlive their source come last among the races of a call.
        self._late: list[tuple[float, LocatedCall, Race]] = []
        self._follow(self.step.calls)
        self.races += self._late

    def _follow(self, calls: Sequence[StepCall]) -> None:
        for call in calls:
            if call.bodies:
                self._follow_bodies(call)
            if call.effects is not None:
                self._call(call, call.effects)
            elif call.node.op == "output":
                self._finish(call)

    def _finish(self, call: StepCall) -> None:
        # The caller of the step reads the results, on the computing stream or on the host: so the output counts as a
        # call that reads them. Nothing may be in flight after it.
        races = self._order.call(call.at, call.uses, (), COMPUTE)
        if self._has_cuda:
            on_host = [x for x in call.node.all_input_nodes if device_of(x.meta.get("val")) == "cpu"]
            races += self._order.call(call.at, call.memory_of(on_host), (), HOST)
        self._add_races(call, races)
        # Launches without a wait, except those that a race names already.
        known = {race.first for _, _, race in self.races}
        left = [] if call.where else self._order.unfinished(self.step.kept)
        self._add_races(call, [race for race in left if race.first not in known])

    def _follow_bodies(self, call: StepCall) -> None:
        if not call.chooses:
            for body in call.bodies:
                self._follow(body)
            return
        before = self._choice
        # In nested choices, the outermost is named.
        self._choice = self._choice or call.at
        # Only one branch runs. So each starts from the same state, and afterwards only those launches have ended for
        # which all branches waited.
        ended: list[dict[int, Any]] = []
        for body in call.bodies:
            state = self._order.state()
            self._follow(body)
            ended.append(self._order.go_back(state))
        everywhere = [work for key, work in ended[0].items() if all(key in other for other in ended)]
        self._order.end(everywhere, self._stream)
        self._choice = before

    def _call(self, call: StepCall, effects: Effects) -> None:
        row, node = effects.row, call.node
        is_ordinary = row.sync is None and row.wait is None and row.launch is None and not effects.frees
        # Most calls run while nothing is in flight: this test is much cheaper than looking for races.
        if self._is_single and is_ordinary and not (self._order.open or self._order.freed):
            return
        if row.sync is not None:
            self._sync(call, row.sync)
        # Waits come before the call's own reads and writes: a call that waits may use the memory that it waited for.
        places = self._places_of(node) if self._has_cuda else 0
        stream = COMPUTE if self._is_single else self._stream_of(node, effects, places)
        if row.wait is not None:
            self._wait(call, effects, stream)
        writes = call.memory_of(effects.writes) if effects.writes else ()
        reads = () if effects.only_shows else call.uses
        if effects.messages:
            self._send(call, effects, stream)
        elif row.launch is not None:
            self._launch(call, effects, reads, writes, stream)
        elif self._is_single:
            self._add_races(call, self._order.races(reads, writes))
        elif places == ON_CUDA and not self._names_streams:  # only one stream uses this memory, and never the host
            if races := self._order.call_of_one(reads, writes, stream):
                self._add_races(call, races)
            if effects.syncs_host:
                self._order.wait_stream(HOST, stream)
        else:
            # New memory counts as written: the allocator may reuse memory that another stream still uses.
            made = flat([call.memory]) if not effects.shares else ()
            self._add_races(call, self._order.call(call.at, reads, (*writes, *made), stream))
            if stream != HOST and (effects.syncs_host or (self._has_cuda and holds_up_host(node))):
                self._order.wait_stream(HOST, stream)
        if effects.frees:
            self._order.report_freed(call.memory_of(effects.frees), call.at)
        if self._names_streams:
            gone = [key for key in call.uses if self.step.last_use[key] == call.time]
            self._add_races(call, self._order.free(gone, call.at))

    def _launch(self, call: StepCall, effects: Effects, reads: Memory, writes: Memory, stream: Stream) -> None:
        self._add_races(call, self._order.call(call.at, reads, writes, stream))
        assert effects.row.launch is not None
        results = call.memory.values() if isinstance(call.memory, Mapping) else [call.memory]
        filled = [memory for x in results if (memory := flat([x]))]
        self._order.launch(call.at, call.time, effects.row.launch, filled, reads)
        if operators.launches_collective(call.node):
            self.entries.append(LaunchEntry(call.at, choice=self._choice))

    def _send(self, call: StepCall, effects: Effects, stream: Stream) -> None:
        assert effects.row.launch is not None
        reads = call.memory_of(each.tensor for each in effects.messages if each.is_sent)
        writes = call.memory_of(each.tensor for each in effects.messages if not each.is_sent)
        self._add_races(call, self._order.call(call.at, reads, writes, stream))
        # A send fills no tensor: its wait completes the `Work` that the call returned, if it did.
        own = () if effects.shares else flat([call.memory])
        for message in effects.messages:
            # Each message is in flight until its own wait, so each is a launch.
            at, memory = call.at._replace(message=message), call.memory_of([message.tensor])
            fills, takes = (own, memory) if message.is_sent else (memory, ())
            self._order.launch(at, call.time, effects.row.launch, [fills], takes)
            self.entries.append(LaunchEntry(at, choice=self._choice))

    def _wait(self, call: StepCall, effects: Effects, stream: Stream) -> None:
        awaited = call.memory_of(effects.awaits)
        for launch in self._order.filling(awaited):
            assert isinstance(launch, LocatedCall)
            if operators.launches_collective(launch.node):
                self.entries.append(LaunchEntry(launch, waits=call.at, choice=self._choice))
        assert effects.row.wait is not None
        found = self._order.wait(effects.row.wait, awaited, call.time, stream)
        self._late += [(call.time, call.at, race) for race in found]

    def _add_races(self, call: StepCall, races: list[Race]) -> None:
        self.races += [(call.time, call.at, race) for race in races]

    # -- streams ----------------------------------------------------------------------------------------

    def _stream_of(self, node: Node, effects: Effects, places: int) -> Stream:
        current = (node.meta.get("custom") or {}).get("stream", self._stream) if self._names_streams else self._stream
        # Launches of collectives, and waits for them, run on the current stream on every device.
        if not self._has_cuda or effects.row.launch is not None or effects.row.wait is not None:
            return current
        return current if places & ON_CUDA else HOST

    def _places_of(self, node: Node) -> int:
        known, found = self._places, 0
        for x in (node, *node.all_input_nodes):
            if (places := known.get(x)) is None:
                places = known[x] = places_of(x.meta.get("val"))
            found |= places
        return found

    def _sync(self, call: StepCall, sync: Sync) -> None:
        # The arguments are the numbers of streams and events, except for KEEP, whose first argument is a tensor.
        first, *others = operators.arguments_of(call.node).values()
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
                self._order.keep_for(call.memory_of([first]), others[0])
