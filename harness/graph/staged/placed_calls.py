"""Places a graph's calls in stages, and each stage's calls in forward and backward; finds the values between stages.

A layer's calls belong to its stage. Other calls belong to the latest stage of their inputs (in backward the earliest,
as gradients flow back), or, without inputs from a stage, to the stage of their first reader. Numbers and views computed
only from the graph's inputs belong to no stage: each stage that reads them computes them.

A parameter that two stages read has a gradient from each. The addition that joins the two belongs to no stage, either:
over micro-batches each stage adds its own gradients, and both sums are joined once per step.

Refused: a value that skips a stage or flows against its direction, e.g. of a call that joins calls of two stages; a
message that is not a dense tensor of known size; more messages than tags; a parameter of two stages whose gradient is
not the sum of both stages' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph.analysis.halves import Half, half_of
from bitproof.harness.graph.operators import is_view
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.symbols import number, source_of
from bitproof.harness.graph.tracing.trace import ChunkSymbol

MOST_CROSSINGS = 16
"""Maximum number of values that a stage sends its neighbour in a half; each has its own tag."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that a stage sends its neighbour: the graph's node that computes it, and its layout."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlacedCalls:
    """A graph's calls with their stages and halves.

    `inputs` and `results` are the graph's; `results` are the loss and the gradients. `open_dim` has the size of a
    remaining symbol. `gradients` has each parameter's gradient in each stage that reads it, `joins` the additions of
    two stages' gradients.
    """

    def __init__(self, module: GraphModule, cuts: Cuts, open_dim: ChunkSymbol) -> None:
        self.module, self.cuts, self._open_dim = module, cuts, open_dim
        graph = module.graph
        self.inputs = graph.find_nodes(op="placeholder")
        outputs: Any = graph.output_node().args[0]
        self.results: list[Node] = list(outputs)
        self.calls = [node for node in graph.nodes if node.op == "call_function"]
        border = [half_of(node) for node in self.calls].index("backward")
        self._backward = set(self.calls[border:])
        self._order = {node: index for index, node in enumerate(self.calls)}
        self._free = self._at_hand()
        self.stages = self._placed()
        self.joins: dict[Node, None] = {}
        self.gradients = {x: self._by_stage(x, y) for x, y in zip(self.inputs, self.results[1:], strict=False)}
        # A join runs once per step and not per micro-batch, so it is in no stage.
        for node in self.joins:
            del self.stages[node]
        self._own: dict[tuple[int, Half], list[Node]] = {}
        for node, stage in sorted(self.stages.items(), key=lambda placed: self._order[placed[0]]):
            self._own.setdefault((stage, self.half(node)), []).append(node)

    def half(self, node: Node) -> Half:
        """The half in which a call runs."""
        return "backward" if node in self._backward else "forward"

    def own(self, stage: int, half: Half) -> list[Node]:
        """A stage's calls in a half, in order."""
        return self._own.get((stage, half), [])

    def given(self, own: Iterable[Node]) -> list[Node]:
        """The values that calls read from elsewhere: graph inputs, and values of other calls that are in stages."""
        return [node for node in self._needed(own) if node.op == "placeholder" or node in self.stages]

    def with_numbers(self, own: Iterable[Node]) -> list[Node]:
        """These calls, with the numbers and views of inputs that they need, in order."""
        return self._in_order({*own, *(node for node in self._needed(own) if node in self._free)})

    def received(self, stage: int, half: Half, given: Iterable[Node]) -> list[Node]:
        """The values that other stages send to a half with the inputs `given`, in the order of their computation.

        Forward also receives values that only backward reads. Raises PassError if there are more values than message
        tags.
        """
        arriving = {node for node in given if node in self.stages and self._arrives(node, stage, half)}
        if half == "forward":
            later = [x for x in self._needed(self.own(stage, "backward")) if x in self.stages]
            arriving |= {x for x in later if self.half(x) == "forward" and self._arrives(x, stage, "forward")}
        if len(arriving) > MOST_CROSSINGS:
            raise PassError(
                f"{half} of stage {stage} would receive more values than there are message tags",
                expected=f"at most {MOST_CROSSINGS} values from a stage to its neighbour",
                found=f"{len(arriving)}",
                fix="choose other stages",
            )
        return self._in_order(arriving)

    def sent(self, own: Iterable[Node]) -> list[Node]:
        """The calls among `own` whose results another stage reads."""
        return [
            node for node in own if any(self.stages.get(x, self.stages[node]) != self.stages[node] for x in node.users)
        ]

    def kept(self, own: Iterable[Node]) -> list[Node]:
        """The calls among `own`, of a stage's forward, that backward reads."""
        return [node for node in own if any(user in self._backward for user in node.users)]

    def results_of(self, own: Iterable[Node]) -> list[Node]:
        """The calls among `own` that are the loss or a parameter's gradient."""
        results = {self.results[0], *(x for by_stage in self.gradients.values() for x in by_stage.values())}
        return [node for node in own if node in results]

    def _by_stage(self, parameter: Node, gradient: Node) -> dict[int, Node]:
        """A parameter's gradient in each stage. Raises PassError unless it is the gradient of a single stage, or the
        sum of two."""
        # Go back through the additions that join gradients of different stages; each part then belongs to one stage.
        joins, parts, waiting = [], list[Node](), [gradient]
        while waiting:
            node = waiting.pop()
            added = node.all_input_nodes if node.target is torch.ops.aten.add.Tensor else []
            if len({self.stages.get(x) for x in added}) > 1 and len(node.users) == 1:
                joins.append(node)
                waiting += added
            else:
                parts.append(node)
        found = {self.stages[node]: node for node in parts}
        if self._readers(parameter) - found.keys() or len(found) < len(parts) or len(found) > 2:
            raise PassError(
                f"stages {', '.join(map(str, sorted({*self._readers(parameter), *found})))} share the parameter "
                f"`{parameter.name}`",
                expected="parameters that one stage reads, or two whose gradients are added",
                found=f"its gradient `{gradient.name}` in stage {self.stages[gradient]}",
                fix="untie the model's parameters",
            )
        self.joins |= dict.fromkeys(reversed(joins))
        return dict(sorted(found.items()))

    def _readers(self, node: Node) -> set[int]:
        """The stages that read a graph input, directly or through views of it."""
        found = set[int]()
        for user in node.users:
            found |= (
                self._readers(user) if user in self._free else {self.stages[user]} if user in self.stages else set()
            )
        return found

    def crossing(self, node: Node) -> Crossing:
        """A value sent between stages, with its layout. Raises PassError if its layout is not known before the step."""
        value, symbol = node.meta.get("val"), self._open_dim
        if not isinstance(value, Tensor):
            raise _unfit(node, f"a {type(value).__name__}")
        sizes = [
            size if isinstance(size, int) else number(size, symbol.symbol, symbol.hint)
            for size in value.shape
            if isinstance(size, int) or size.node.expr.free_symbols <= {symbol.symbol}
        ]
        if len(sizes) < value.dim():
            raise _unfit(node, f"a tensor of shape {list(map(str, value.shape))}")
        return Crossing(node.name, tuple(map(int, sizes)), value.dtype)

    def _in_order(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self._order.__getitem__)

    def _at_hand(self) -> set[Node]:
        """Numbers and views computed only from the graph's inputs."""
        free: set[Node] = set()
        for node in self.calls:
            is_tensor = isinstance(node.meta.get("val"), (Tensor, tuple, list, type(None)))  # a fault's call has none
            reads_inputs = all(x.op == "placeholder" or x in free for x in node.all_input_nodes)
            if reads_inputs and (is_view(node.target) if is_tensor else bool(node.all_input_nodes)):
                free.add(node)
        return free

    def _placed(self) -> dict[Node, int]:
        stages: dict[Node, int] = {}
        for node in self.calls:
            if node in self._free:
                continue
            read = [x for x in node.all_input_nodes if x in stages]
            if (own := self.cuts.stage_of(node)) is not None:
                stages[node] = own
            elif node not in self._backward and read:
                stages[node] = max(stages[x] for x in read)
            elif read:
                gradients = [x for x in read if x in self._backward]
                stages[node] = min(stages[x] for x in gradients or read)
        # Calls without inputs from a stage, e.g. constants: computed by their first reader.
        for node in reversed(self.calls):
            if node not in stages and node not in self._free:
                readers = [stages[user] for user in node.users if user in stages]
                choose = max if node in self._backward else min
                stages[node] = choose(readers, default=0)
        return stages

    def _needed(self, own: Iterable[Node]) -> Iterator[Node]:
        """Each value from outside that these calls need, once.

        Every stage computes numbers and views itself, so these are followed to the values that they read.
        """
        inside, seen = set(own), set[Node]()

        def needed(nodes: Iterable[Node]) -> Iterator[Node]:
            for node in nodes:
                for read in node.all_input_nodes:
                    if read in seen or read in inside:
                        continue
                    seen.add(read)
                    if read in self._free:
                        yield from needed([read])
                        yield read
                    elif read.op == "placeholder" or read in self.stages:
                        yield read

        return needed(own)

    def _arrives(self, value: Node, stage: int, half: Half) -> bool:
        """Whether a half receives a value from another stage, not from its own stage's forward."""
        there, way = self.stages[value], self.half(value)
        if (there, way) == (stage, "forward"):
            return False
        is_next = there == stage - 1 if way == "forward" else there == stage + 1
        if not is_next or (way == "backward" and half == "forward"):
            raise PassError(
                f"stage {stage} reads in {half} what stage {there} computes in {way}: `{value.name}`",
                expected="activations of the stage before, gradients of the stage after, and values of its own forward",
                found=f"`{value.name}` of {source_of(value)}",
                fix="choose other stages, or leave out the pass that joined calls of two stages",
            )
        return way == half


def _unfit(node: Node, found: str) -> PassError:
    return PassError(
        f"a stage would send its neighbour `{node.name}`, whose size is unknown before the step",
        expected="between stages, tensors whose sizes the case determines",
        found=f"{found}, of {source_of(node)}",
        fix="choose other stages",
    )
