"""Cuts the finished graph of one micro-batch into stages, and each stage into forward and backward.

Needs:    a graph whose calls say where they come from, forward's before backward's; layers that are named layers.N.
Promises: every call is in one part, in its order; numbers and views computed only from the graph's inputs are
          repeated in each part that reads them. Run one after the other, the parts equal the graph.
Refuses:  a value that skips a stage or flows against its direction, such as that of a call that joins calls of two
          stages; a parameter of two stages; a message that is no dense tensor of known size.

1. Stages of calls: a layer's calls belong to its stage; others to the latest stage of their inputs (in backward the
   earliest, as gradients flow back), or, without inputs from a stage, to that of their first reader.
2. Values between parts: activations to the next stage, gradients to the previous one, and backward's inputs from
   its own stage's forward.
3. Write each part as a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph.analysis.halves import Half, written
from bitproof.harness.graph.operators import is_view
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.symbols import number, source_of
from bitproof.harness.graph.tracing.trace import ChunkSymbol


@dataclass(frozen=True)
class Crossing:
    """A tensor that one stage sends its neighbour: the graph's node that computes it, and its layout."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """A half of a stage: its graph, and its inputs and outputs in order, by the names of the whole graph's nodes.

    `received` are the inputs from another stage, `sent` the outputs to another stage. `results` are the step's own: the
    loss, gradients.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    received: tuple[Crossing, ...]
    sent: tuple[str, ...]
    results: tuple[str, ...]


MOST_CROSSINGS = 16
"""The most values that a stage sends its neighbour in one half; each has its own tag."""


@dataclass(frozen=True)
class CutGraph:
    """All parts, by stage and half, and the names of the whole graph's inputs and outputs, in order."""

    by_place: dict[tuple[int, Half], Part]
    placeholders: tuple[str, ...]
    loss: str
    gradients: tuple[str, ...]
    cuts: Cuts
    open_dim: ChunkSymbol

    def of_other(self, module: GraphModule) -> CutGraph:
        """Another graph of the same step, cut alike."""
        return cut(module, self.cuts, self.open_dim)


def cut(module: GraphModule, cuts: Cuts, open_dim: ChunkSymbol) -> CutGraph:
    """The graph in parts; `module` stays unchanged. `open_dim` has the size of the remaining symbol, if any.

    Raises PassError: see above.
    """
    return _Cut(module, cuts, open_dim).parts()


class _Cut:
    def __init__(self, module: GraphModule, cuts: Cuts, open_dim: ChunkSymbol) -> None:
        self._module, self._cuts, self._open_dim = module, cuts, open_dim
        graph = module.graph
        self._inputs = graph.find_nodes(op="placeholder")
        outputs: Any = graph.output_node().args[0]
        self._results: list[Node] = list(outputs)
        self._calls = [node for node in graph.nodes if node.op == "call_function"]
        directions = [origin_of(node).direction for node in self._calls]
        border = directions.index("backward")
        self._backward = set(self._calls[border:])
        self._free = self._at_hand()
        self._stages = self._place_calls()

    def parts(self) -> CutGraph:
        """Every part."""
        halves: tuple[Half, ...] = ("forward", "backward")
        places = [(stage, half) for stage in range(self._cuts.num_stages) for half in halves]
        parts = {place: self._part(*place) for place in places}
        self._refuse_shared(parts)
        inputs, results = (tuple(node.name for node in nodes) for nodes in (self._inputs, self._results))
        return CutGraph(parts, inputs, results[0], results[1:], self._cuts, self._open_dim)

    def _at_hand(self) -> set[Node]:
        """Numbers and views computed only from the graph's inputs."""
        free: set[Node] = set()
        for node in self._calls:
            is_tensor = isinstance(node.meta["val"], (Tensor, tuple, list, type(None)))
            reads_inputs = all(x.op == "placeholder" or x in free for x in node.all_input_nodes)
            if reads_inputs and (is_view(node.target) if is_tensor else bool(node.all_input_nodes)):
                free.add(node)
        return free

    def _half(self, node: Node) -> Half:
        return "backward" if node in self._backward else "forward"

    def _place_calls(self) -> dict[Node, int]:
        """Step 1."""
        stages: dict[Node, int] = {}
        for node in self._calls:
            if node in self._free:
                continue
            read = [x for x in node.all_input_nodes if x in stages]
            if (own := self._cuts.stage_of(node)) is not None:
                stages[node] = own
            elif node not in self._backward and read:
                stages[node] = max(stages[x] for x in read)
            elif read:
                gradients = [x for x in read if x in self._backward]
                stages[node] = min(stages[x] for x in gradients or read)
        for node in reversed(self._calls):
            if node not in stages and node not in self._free:
                readers = [stages[user] for user in node.users if user in stages]
                choose = max if node in self._backward else min
                stages[node] = choose(readers, default=0)
        return stages

    def _part(self, stage: int, half: Half) -> Part:
        """Steps 2 and 3."""
        own = [node for node in self._calls if node not in self._free and self._is_in(node, stage, half)]
        needed = list(dict.fromkeys(self._needed(own)))
        given = [node for node in needed if node.op == "placeholder" or node in self._stages]
        inside = {*own, *needed} - {*given}
        calls = [node for node in self._calls if node in inside]
        received = self._sent_to(stage, half, given)
        sent = [node for node in own if any(self._is_sent(node, user) for user in node.users)]
        step_results = set(self._results)
        results = [node for node in own if node in step_results]
        kept = [node for node in own if half == "forward" and any(user in self._backward for user in node.users)]
        outputs = list(dict.fromkeys([*sent, *results, *kept]))
        return Part(
            module=written(self._module, given, calls, outputs),
            inputs=tuple(node.name for node in given),
            outputs=tuple(node.name for node in outputs),
            received=tuple(map(self._crossing, received)),
            sent=tuple(node.name for node in sent),
            results=tuple(node.name for node in results),
        )

    def _is_in(self, node: Node, stage: int, half: Half) -> bool:
        return self._stages[node] == stage and self._half(node) == half

    def _needed(self, own: Sequence[Node]) -> Iterator[Node]:
        """A part's inputs, the numbers that it repeats, and their inputs."""
        inside = set(own)
        for node in own:
            for read in node.all_input_nodes:
                if read in self._free:
                    yield from self._needed([read])
                    yield read
                elif read.op == "placeholder" or (read in self._stages and read not in inside):
                    yield read

    def _sent_to(self, stage: int, half: Half, given: Sequence[Node]) -> list[Node]:
        """The values sent to a part, in the order of computation; for forward also those that only backward reads."""
        arriving = {node for node in given if node in self._stages and self._arrives(node, stage, half)}
        if half == "forward":
            later = [node for node in self._calls if node not in self._free and self._is_in(node, stage, "backward")]
            needed = [node for node in self._needed(later) if node in self._stages and self._half(node) == "forward"]
            arriving |= {node for node in needed if self._arrives(node, stage, "forward")}
        if len(arriving) > MOST_CROSSINGS:
            raise PassError(
                f"{half} of stage {stage} would be sent more values than messages can be distinguished",
                expected=f"at most {MOST_CROSSINGS} values from a stage to its neighbour",
                found=f"{len(arriving)}",
                fix="choose other stages",
            )
        return [node for node in self._calls if node in arriving]

    def _arrives(self, value: Node, stage: int, half: Half) -> bool:
        """Whether a half receives an input from another stage, and not from its own stage's forward."""
        there, way = self._stages[value], self._half(value)
        if (there, way) == (stage, "forward"):
            return False
        is_next = there == stage - 1 if way == "forward" else there == stage + 1
        if not is_next or (way == "backward" and half == "forward"):
            raise PassError(
                f"stage {stage} reads in {half} what stage {there} computes in {way}: `{value.name}`",
                expected="activations of the stage before, gradients of the stage after, and what its own forward gave",
                found=f"`{value.name}` of {source_of(value)}",
                fix="choose other stages, or leave out the pass that joined calls of two stages",
            )
        return way == half

    def _is_sent(self, value: Node, user: Node) -> bool:
        return user in self._stages and self._stages[user] != self._stages[value]

    def _crossing(self, node: Node) -> Crossing:
        value, symbol = node.meta["val"], self._open_dim
        if not isinstance(value, Tensor):
            raise self._unfit(node, f"a {type(value).__name__}")
        sizes = [
            size if isinstance(size, int) else number(size, symbol.symbol, symbol.hint)
            for size in value.shape
            if isinstance(size, int) or size.node.expr.free_symbols <= {symbol.symbol}
        ]
        if len(sizes) < value.dim():
            raise self._unfit(node, f"a tensor of shape {list(map(str, value.shape))}")
        return Crossing(node.name, tuple(map(int, sizes)), value.dtype)

    def _unfit(self, node: Node, found: str) -> PassError:
        return PassError(
            f"a stage would send its neighbour `{node.name}`, which has no size that is known before the step",
            expected="tensors whose sizes the case decides between stages",
            found=f"{found}, of {source_of(node)}",
            fix="choose other stages",
        )

    def _refuse_shared(self, parts: dict[tuple[int, Half], Part]) -> None:
        """Refuse a parameter that is not in one stage together with its gradient."""
        number_of_gradients = len(self._results) - 1
        for parameter, gradient in zip(self._inputs[:number_of_gradients], self._results[1:], strict=True):
            stages = {stage for (stage, _), part in parts.items() if parameter.name in part.inputs}
            if stages | {self._stages[gradient]} != {self._stages[gradient]}:
                raise PassError(
                    f"stages {', '.join(map(str, sorted(stages)))} share the parameter `{parameter.name}`",
                    expected="parameters that one stage reads",
                    found=f"its gradient `{gradient.name}` in stage {self._stages[gradient]}",
                    fix="untie the model's parameters",
                )
