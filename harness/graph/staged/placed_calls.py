"""Places a graph's calls in pipeline stages, and each stage's calls in forward and backward.

The rules:

1. The calls of a layer belong to the layer's stage.
2. Any other call belongs to the last stage that computes an input of the call. In backward it belongs to the first such
   stage, as gradients flow back.
3. A call without inputs from a stage belongs to the stage of its first reader.
4. Numbers and views computed only from the graph's inputs belong to no stage. Each stage that reads them computes them.
5. A parameter that two stages read has a gradient from each stage. Each stage adds its own gradients over
   micro-batches. The addition of the two sums belongs to no stage, and runs once per step.

Refused are:

- a value that skips a stage or flows against its direction, such as the result of a call that joins calls of two
  stages;
- a message that is not a dense tensor of known size;
- more messages than tags;
- a parameter of two stages whose gradient is not the sum of both stages' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph.analysis.halves import Half, half_of
from bitproof.harness.graph.operators import is_random, is_view, written_arguments
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.harness.graph.staged.once_a_step import find_gathers, find_reductions
from bitproof.harness.graph.symbols import number, source_of
from bitproof.harness.graph.tracing.trace import ChunkSymbol

OnceAStep = Literal["gathers", "reductions"]
Apart = Literal["gathers", "reductions", "weights"]
ONCE_A_STEP: tuple[OnceAStep, ...] = ("gathers", "reductions")


class Once(NamedTuple):
    """States which of a stage's calls run apart from its forward and backward.

    - `gathers`, `reductions`: True if these calls run once a step instead of once a micro-batch (once_a_step.py).
    - `weights`: True if the gradients of weights are computed later than the gradient of the stage's input.
    """

    gathers: bool = False
    reductions: bool = False
    weights: bool = False


NOTHING_ONCE = Once()

MOST_CROSSINGS = 16
"""Maximum number of values that a stage sends its neighbour in a half; each value has its own message tag."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that a stage sends to a neighbour: its shape, its dtype, and the name of the node that computes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlacedCalls:
    """A graph's calls, each placed in a pipeline stage and in a half of the stage: forward or backward.

    - `inputs`: the graph's inputs.
    - `results`: the graph's outputs, the loss and the gradients.
    - `stages`: the stage of each call that belongs to a stage.
    - `gradients`: for each parameter a dict: by stage, the gradient that the stage computes.
    - `joins`: the additions of the gradients of two stages.
    - `summed`: the values that are added over micro-batches before they are reduced.

    `open_dim` is the chunk symbol and its size, for sizes that still contain the symbol.
    """

    def __init__(self, module: GraphModule, cuts: Cuts, open_dim: ChunkSymbol, once: Once = NOTHING_ONCE) -> None:
        self.module, self.cuts, self._open_dim = module, cuts, open_dim
        graph = module.graph
        self.inputs = graph.find_nodes(op="placeholder")
        outputs: Any = graph.output_node().args[0]
        self.results: list[Node] = list(outputs)
        self.calls = [node for node in graph.nodes if node.op == "call_function"]
        # All calls from the first call of backward on run in backward, whatever half they state.
        border = [half_of(node) for node in self.calls].index("backward")
        self._backward = set(self.calls[border:])
        self._order = {node: index for index, node in enumerate(self.calls)}
        # The order matters: `_free` calls get no stage, and `_gradients_by_stage` needs all stages to find additions of
        # two stages' gradients, which then lose theirs.
        self._free = self._find_free()
        self.stages = self._find_stages()
        self.joins: dict[Node, None] = {}
        self.gradients = {
            x: self._gradients_by_stage(x, y) for x, y in zip(self.inputs, self.results[1:], strict=False)
        }
        # A join runs once per step and not per micro-batch, so it is in no stage.
        for node in self.joins:
            del self.stages[node]
        parameters = self.inputs[: len(self.results) - 1]
        by_stage = [x for each in self.gradients.values() for x in each.values()]
        self._gathers = find_gathers(self.calls, parameters, self.stages) if once.gathers else set[Node]()
        self._reductions = (
            find_reductions(self.calls, by_stage, self.joins, self._backward.__contains__, self.stages)
            if once.reductions
            else set[Node]()
        )
        # A gradient that is ready before any reduction is added as it is.
        self.summed = {x for node in self._reductions for x in node.all_input_nodes} - self._reductions
        self._weights = self._find_weights() if once.weights else set[Node]()
        self._own: dict[tuple[int, Half | Apart], list[Node]] = {}
        for node, stage in sorted(self.stages.items(), key=lambda placed: self._order[placed[0]]):
            kinds: dict[Apart, set[Node]] = {
                "gathers": self._gathers,
                "reductions": self._reductions,
                "weights": self._weights,
            }
            apart = next((kind for kind, nodes in kinds.items() if node in nodes), None)
            self._own.setdefault((stage, apart or self.half(node)), []).append(node)

    def half(self, node: Node) -> Half:
        """Return the half in which a call runs."""
        return "backward" if node in self._backward else "forward"

    def own(self, stage: int, half: Half | Apart) -> list[Node]:
        """Return the calls of a stage's forward or backward, or of a kind that it runs apart, in the graph's order."""
        return self._own.get((stage, half), [])

    def given(self, own: Iterable[Node]) -> list[Node]:
        """Return the values that the calls `own` need and do not compute: graph inputs, and results of other calls.

        Each stage computes numbers and views of the graph's inputs itself, so these are not in the list.
        """
        return [node for node in self._needed(own) if node.op == "placeholder" or node in self.stages]

    def with_numbers(self, own: Iterable[Node]) -> list[Node]:
        """Return `own`, and the calls for numbers and views of inputs that these calls need, in the graph's order."""
        return self._in_order({*own, *(node for node in self._needed(own) if node in self._free)})

    def received(self, stage: int, half: Half, given: Iterable[Node]) -> list[Node]:
        """Return the values that a stage's forward or backward receives from other stages, in the graph's order.

        `given` are the inputs of this half. Raises PassError if there are more values than message tags.
        """
        # What a stage gathers once a step is ready before any of its halves.
        given = [node for node in given if node not in self._gathers]
        arriving = {node for node in given if node in self.stages and self._arrives(node, stage, half)}
        if half == "forward":
            later = [
                x for x in self._needed(self.own(stage, "backward")) if x in self.stages and x not in self._gathers
            ]
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
        """Return the calls among `own` whose results another stage reads."""
        return [
            node for node in own if any(self.stages.get(x, self.stages[node]) != self.stages[node] for x in node.users)
        ]

    def kept(self, own: Iterable[Node]) -> list[Node]:
        """Return the calls among `own` whose results the backward pass reads.

        `own` must be calls of a stage's forward.
        """
        return [node for node in own if any(user in self._backward for user in node.users)]

    def results_of(self, own: Iterable[Node]) -> list[Node]:
        """Return the calls among `own` that compute the loss, a parameter's gradient, or a value in `summed`."""
        results = {self.results[0], *self.summed, *(x for each in self.gradients.values() for x in each.values())}
        return [node for node in own if node in results]

    def kept_for_weights(self, stage: int) -> list[Node]:
        """Return the results of the first part of a stage's divided backward that the second part reads."""
        return [x for x in self.own(stage, "backward") if any(user in self._weights for user in x.users)]

    def gathered(self, stage: int) -> list[Node]:
        """Return the results of a stage's gathers that its other calls read."""
        return [x for x in self.own(stage, "gathers") if any(user not in self._gathers for user in x.users)]

    def _gradients_by_stage(self, parameter: Node, gradient: Node) -> dict[int, Node]:
        """Return a dict: each stage that computes a gradient of `parameter` -> that gradient.

        `gradient` is the whole gradient of the parameter. Raises PassError unless a single stage computes the whole, or
        the whole is the sum of two stages' gradients.
        """
        # Go back through additions whose operands are from different stages, down to the gradients of single stages.
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
        # Each stage that reads the parameter must have exactly one gradient, and at most two stages may.
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

    def _find_weights(self) -> set[Node]:
        """Return the calls of backward for whose results the previous stage does not wait.

        Raises PassError for a call with effects, as other micro-batches' calls come between the two parts.
        """
        backward = [x for x in self.calls if x in self._backward and x in self.stages and x not in self._reductions]
        waited = set[Node]()
        for node in reversed(backward):
            stage = self.stages[node]
            if any(user in waited or self.stages.get(user, stage) != stage for user in node.users):
                waited.add(node)
            if is_random(node) or written_arguments(node):
                raise PassError(
                    f"the backward of stage {stage} cannot be divided: `{node.name}` writes in place, or draws numbers",
                    expected="calls that only compute values, as those of other micro-batches run between the parts",
                    found=f"{node.target}",
                    where=source_of(node),
                    fix="choose the order 1f1b",
                )
        return set(backward) - waited - self._gathers

    def _readers(self, node: Node) -> set[int]:
        """Return the stages that read a graph input, or a number or a view that is computed from it."""
        found = set[int]()
        for user in node.users:
            found |= (
                self._readers(user) if user in self._free else {self.stages[user]} if user in self.stages else set()
            )
        return found

    def crossing(self, node: Node) -> Crossing:
        """Return the Crossing of a value that stages send. Raises PassError if the value's shape depends on data."""
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

    def _find_free(self) -> set[Node]:
        free: set[Node] = set()
        for node in self.calls:
            # Each stage may compute these again, since a number or a view costs no time and no memory.
            is_tensor = isinstance(node.meta.get("val"), (Tensor, tuple, list, type(None)))  # a fault's call has none
            reads_inputs = all(x.op == "placeholder" or x in free for x in node.all_input_nodes)
            if reads_inputs and (is_view(node.target) if is_tensor else bool(node.all_input_nodes)):
                free.add(node)
        return free

    def _find_stages(self) -> dict[Node, int]:
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
                # Not by its activations: the input of a stage's first layer is an activation of the stage before.
                gradients = [x for x in read if x in self._backward]
                stages[node] = min(stages[x] for x in gradients or read)
        # Calls without inputs from a stage, e.g. constants: computed by their first reader.
        for node in reversed(self.calls):
            if node not in stages and node not in self._free:
                # Reversed, so that the readers of a call have their stages first.
                readers = [stages[user] for user in node.users if user in stages]
                choose = max if node in self._backward else min
                stages[node] = choose(readers, default=0)
        return stages

    def _needed(self, own: Iterable[Node]) -> Iterator[Node]:
        """Yield each value outside `own` that the calls `own` need, once.

        Every stage computes numbers and views of the graph's inputs itself, so it also needs the inputs of these calls.
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
        """Whether a stage receives `value` from another stage in this half. False if its own forward computes it.

        Raises PassError for a value that skips a stage or flows against its direction.
        """
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
        # In backward, an activation from the stage before is already here: this stage's forward received it.
        return way == half


def _unfit(node: Node, found: str) -> PassError:
    return PassError(
        f"a stage would send its neighbour `{node.name}`, whose size is unknown before the step",
        expected="between stages, tensors whose sizes the case determines",
        found=f"{found}, of {source_of(node)}",
        fix="choose other stages",
    )
