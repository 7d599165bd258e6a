"""Divides a traced step into a graph for each stage, and joins the graphs again after the passes have run on each.

Needs:    a graph whose calls state their origin, with forward's calls before backward's; layers that are named
          layers.N.
Promises: a stage's graph is a joint graph: its parameters come first among its inputs, in the order of their gradients,
          and each of its calls states its half. If they are joined without a pass in between, the stages compute the
          same as the graph.
Refuses:  graphs that placed_calls.py refuses, and a module that runs in two stages.

1. Place calls in stages and halves (placed_calls.py).
2. Write each stage as a graph. Received values are inputs. Each stage computes the numbers and views of the graph's
   inputs that it reads.
3. Join: all stages' forwards, from the first stage on, then their backwards, from the last stage on. Each call then
   states its stage, too: cut_graph.py reads it.

A stage's outputs are:

- the loss, None except in the last stage;
- its gradients;
- a tuple of the values that it sends: activations, then gradients of received values.

Without stages there is a single graph, the step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph.analysis.halves import HALF_KEY, Half, half_of, subgraph
from bitproof.harness.graph.analysis.saved_activations import names_to_save
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import calls_of, origin_of
from bitproof.harness.graph.staged.cuts import STAGE_KEY, Cuts
from bitproof.harness.graph.staged.placed_calls import PlacedCalls
from bitproof.harness.graph.tracing.trace import ChunkSymbol
from bitproof.harness.torch_compat import LazyGraphModule


@dataclass
class StageGraph:
    """The graph of a stage. Passes replace `module`, the graph in its current state.

    - `modules`: the names of the modules that run in the stage.
    - `received`, `sent`: the names of values from other stages and for other stages, in the traced graph.
    - `parameters`: the names of the stage's parameters in the traced graph.
    """

    module: GraphModule
    modules: frozenset[str] = frozenset()
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of all stages of a traced step, in the stages' order.

    `traced` is the graph of the whole step. `placed` has its calls by stage; None if there is a single stage.
    """

    traced: GraphModule
    graphs: Sequence[StageGraph]
    placed: PlacedCalls | None = None

    @staticmethod
    def of(module: GraphModule, cuts: Cuts, open_dim: ChunkSymbol) -> StageGraphs:
        """Divide a graph into pipeline stages, and mark each of its calls with its half: forward or backward.

        A single stage's graph is `module` itself, without marks. Raises PassError for a graph that cannot be divided.
        """
        if cuts.num_stages == 1:
            return StageGraphs(module, [StageGraph(module)])
        _refuse_shared_modules(module, cuts)
        placed = PlacedCalls(module, cuts, open_dim)
        for node in placed.calls:
            node.meta[HALF_KEY] = placed.half(node)
        read = {node for node in placed.inputs if node.users}
        # Inputs that no call reads go to the first stage, so that the joined graph has all inputs.
        unread = [node for node in placed.inputs if node not in read]
        stages = range(cuts.num_stages)
        graphs = [_stage_graph(placed, stage, unread if stage == 0 else []) for stage in stages]
        return StageGraphs(module, graphs, placed)

    def context_of(self, graph: StageGraph, context: PassContext) -> PassContext:
        """Return the context for the passes of a stage.

        This is `context` without the chosen modules and operators that only other stages call.
        """
        if len(self.graphs) == 1:
            return context
        # A pass may refuse a chosen module or operator that never runs, so those of other stages are left out.
        elsewhere = frozenset().union(*(other.modules for other in self.graphs)) - graph.modules
        own = {name: calls for name, calls in context.module_calls.items() if name not in elsewhere}
        chunking = context.chunking
        if chunking is not None and (only := tuple(name for name in chunking.only if name not in elsewhere)):
            chunking = replace(chunking, only=only)
        memory = context.memory
        if memory.save is not None:
            here, everywhere = (
                {name for node in module.graph.nodes for name in names_to_save(node)}
                for module in (graph.module, self.traced)
            )
            own_save = (entry for entry in memory.save if entry.partition("/")[0] not in everywhere - here)
            memory = replace(memory, save=tuple(own_save))
        return replace(context, module_calls=own, chunking=chunking, memory=memory, facts={})

    def joined(self) -> GraphModule:
        """Join the current graphs of all stages in a single graph (step 3 of this module)."""
        return self.graphs[0].module if self.placed is None else _Joined(self, self.placed).module()


def _stage_graph(placed: PlacedCalls, stage: int, also_read: list[Node]) -> StageGraph:
    """Write the graph of a stage (step 2 of this module). It also gets the graph inputs `also_read`."""
    own: dict[Half, list[Node]] = {"forward": placed.own(stage, "forward"), "backward": placed.own(stage, "backward")}
    received: list[Node] = []
    for half, calls in own.items():
        received += placed.received(stage, half, placed.given(calls))
    for node in received:
        placed.crossing(node)  # raises for an unknown size
    calls = [*own["forward"], *own["backward"]]
    sent = [*placed.sent(own["forward"]), *placed.sent(own["backward"])]
    loss = placed.results[0]
    gradients = {parameter: each[stage] for parameter, each in placed.gradients.items() if stage in each}
    read = {*placed.given(calls), *also_read}
    others = [node for node in placed.inputs if node in read and node not in gradients]
    outputs = [loss if placed.stages[loss] == stage else None, *gradients.values(), tuple(sent)]
    module = subgraph(placed.module, [*gradients, *others, *received], placed.with_numbers(calls), outputs)
    for node in module.graph.find_nodes(op="placeholder")[len(gradients) + len(others) :]:
        # A received value is an input here. Its other metadata (origin, half, marks) belongs to the call in its stage.
        node.meta = {"val": node.meta["val"]}
    return StageGraph(
        module=module,
        modules=_modules(calls),
        received=tuple(node.name for node in received),
        sent=tuple(node.name for node in sent),
        parameters=tuple(node.name for node in gradients),
    )


def _modules(calls: Sequence[Node]) -> frozenset[str]:
    """Return the names of the modules to which calls belong, and of all modules around these."""
    found = set[str]()
    for name in {origin_of(node).module or "" for node in calls}:
        parts = name.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return frozenset(found)


def _refuse_shared_modules(module: GraphModule, cuts: Cuts) -> None:
    for node in module.graph.nodes:
        own = cuts.stage_of(node)
        for call in calls_of(node):
            if (around := cuts.stage_of_module(call.module)) not in (None, own):
                raise PassError(
                    f"stages {min(own or 0, around or 0)} and {max(own or 0, around or 0)} share the module "
                    f"{origin_of(node).module}",
                    expected="a module that a single stage runs; two modules may share all parameters",
                    found=f"`{node.name}` of {origin_of(node).module}, within {call.module}",
                    fix="make it two modules, and share their parameters",
                )


class _Joined:
    def __init__(self, stages: StageGraphs, placed: PlacedCalls) -> None:
        self._stages, self._placed = stages, placed
        self._graph = Graph()
        self._env: dict[tuple[int, Node], Node] = {}
        self._attributes: dict[str, Any] = {}
        self._inputs: dict[str, Node] = {}
        self._sent: dict[str, Node] = {}
        """The values sent so far, by their names in the traced graph."""
        self._gradients: dict[tuple[str, int], Node] = {}
        """The gradients written so far, by parameter and stage."""

    def module(self) -> GraphModule:
        graphs = [stage.module for stage in self._stages.graphs]
        # Reversed, so that an input has its metadata from the first stage that reads it.
        own = {node.name: node for module in reversed(graphs) for node in module.graph.find_nodes(op="placeholder")}
        for node in self._placed.inputs:
            self._inputs[node.name] = self._graph.placeholder(node.name)
            self._inputs[node.name].meta = dict(own[node.name].meta)
        for stage in range(len(graphs)):
            self._copy(stage, "forward")
        for stage in reversed(range(len(graphs))):
            self._copy(stage, "backward")
        self._graph.output([self._loss(), *self._results()])
        self._graph.output_node().meta.update(self._stages.traced.graph.output_node().meta)
        return LazyGraphModule(self._attributes, self._graph)

    def _copy(self, index: int, half: Half) -> None:
        stage = self._stages.graphs[index]
        # A call without a half belongs to the half of the calls before it.
        is_backward = False
        for node in stage.module.graph.nodes:
            # A reference to a nested graph is copied once, with forward; calls of backward read the same copy.
            if node.op == "get_attr" and half == "forward":
                self._env[index, node] = self._graph.node_copy(node)
                self._attributes[str(node.target)] = getattr(stage.module, str(node.target))
            if node.op != "call_function":
                continue
            is_backward = is_backward or half_of(node) == "backward"
            if is_backward == (half == "backward"):
                copy = self._graph.node_copy(node, lambda x: self._read(index, x))
                copy.meta |= {HALF_KEY: half, STAGE_KEY: index}
                self._env[index, node] = copy
        self._note_results(index)

    def _read(self, index: int, node: Node) -> Node:
        if node.op != "placeholder":
            return self._env[index, node]
        if node.name in self._inputs:
            return self._inputs[node.name]
        # Any other input is a value that another stage sends: that stage's half must already be copied.
        if node.name not in self._sent:
            raise PassError(
                f"stage {index} is sent `{node.name}` before a stage has computed it",
                expected="activations that a stage's forward computes, and gradients that its backward does",
                found="an output that passes moved to the other half",
            )
        return self._sent[node.name]

    def _note_results(self, index: int) -> None:
        stage = self._stages.graphs[index]
        outputs: Any = stage.module.graph.output_node().args[0]
        _, *gradients, sent = outputs
        # After forward, only forward's values are known; the others are noted after backward.
        known: Any = lambda node: node.op == "placeholder" or (index, node) in self._env  # noqa: E731
        self._sent |= {name: self._read(index, x) for name, x in zip(stage.sent, sent, strict=True) if known(x)}
        pairs = zip(stage.parameters, gradients, strict=True)
        self._gradients |= {(name, index): self._read(index, x) for name, x in pairs if known(x)}

    def _loss(self) -> Node:
        outputs: Any = self._stages.graphs[-1].module.graph.output_node().args[0]
        return self._read(len(self._stages.graphs) - 1, outputs[0])

    def _results(self) -> list[Node]:
        """Return the gradients of all parameters.

        If two stages have a gradient of a parameter, a copy of the traced graph's addition adds the two.
        """
        env = {x: self._gradients[p.name, i] for p, each in self._placed.gradients.items() for i, x in each.items()}
        for node in self._placed.joins:
            env[node] = self._graph.node_copy(node, env.__getitem__)
        return [env[node] for node in self._placed.results[1:]]
