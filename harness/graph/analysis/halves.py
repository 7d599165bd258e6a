"""The forward half and the backward half of a step's graph, and the values that forward saves for backward.

A call has a half and a direction. The half states when the call runs; the direction states which computation it belongs
to. For example, an activation that is recomputed in backward has the direction forward and the half backward.

Only the calls of a partitioned graph (passes/partition.py) state their half. No pass moves a call to the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.graph.origin import origin_of

Half = Literal["forward", "backward"]

HALF_KEY = "half"
"""The metadata key of a call's half. Only calls of a partitioned graph have it."""


def half_of(node: Node) -> Half:
    """Return the half in which a call runs. In a graph that is not partitioned, this is the call's direction."""
    half: Half = node.meta.get(HALF_KEY) or origin_of(node).direction
    return half


def is_partitioned(graph: Graph) -> bool:
    return any(HALF_KEY in node.meta for node in graph.nodes)


def set_half(node: Node, half: Half) -> None:
    """Set the half in which a call runs. Does nothing in a graph that is not partitioned."""
    if HALF_KEY in node.meta:
        node.meta[HALF_KEY] = half


@dataclass(frozen=True)
class Halves:
    """A step's forward and backward as two graphs:

        forward(graph inputs) -> loss, saved values
        backward(saved values, graph inputs that backward reads) -> gradients

    - `saved`: the names of the saved values.
    - `read_again`: the indices of the graph inputs that backward reads.
    """

    forward: GraphModule
    backward: GraphModule
    saved: list[str]
    read_again: list[int]


def run_halves(forward: Any, backward: Any, read_again: Sequence[int], *inputs: Any) -> tuple[Any, ...]:
    """Run the two halves of a step, and return the loss followed by the gradients.

    `read_again` has the indices of the `inputs` that backward reads, in addition to the values that forward saves.
    """
    loss, *saved = forward(*inputs)
    return (loss, *backward(*saved, *(inputs[index] for index in read_again)))


def divide(module: GraphModule) -> Halves:
    """Return the two halves of a partitioned graph. Does not change `module`.

    A call that states no half, for example from a user's pass, is in the half of the calls before it.
    """
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    outputs: Any = graph.output_node().args[0]
    loss, *gradients = outputs
    # Halves are contiguous: all calls from the first call of backward on belong to backward, marked or not.
    border = next(index for index, node in enumerate(calls) if node.meta.get(HALF_KEY) == "backward")
    of_forward, of_backward = calls[:border], calls[border:]
    # A gradient may be computed in forward, or be a graph input: then no call of backward reads it.
    needed = {x for node in of_backward for x in node.all_input_nodes} | set(gradients)
    is_saved = [node for node in of_forward if node in needed]
    read_again = [node for node in inputs if node in needed]
    return Halves(
        forward=subgraph(module, inputs, of_forward, [loss, *is_saved]),
        backward=subgraph(module, [*is_saved, *read_again], of_backward, gradients),
        saved=[node.name for node in is_saved],
        read_again=[inputs.index(node) for node in read_again],
    )


def subgraph(module: GraphModule, inputs: list[Node], calls: list[Node], outputs: list[Any]) -> GraphModule:
    """Return a new module with copies of `calls`, which are calls of `module`.

    - `inputs`: nodes that become the inputs of the new graph. All nodes that the calls read must be here or in `calls`,
      except references to nested graphs.
    - `outputs`: the nodes that the new graph returns.
    """
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in calls:
        # A reference to a nested graph is copied before its first reader. GraphModule below copies the graph itself.
        for reference in node.all_input_nodes:
            if reference.op == "get_attr" and reference not in env:
                env[reference] = graph.node_copy(reference)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(map_arg(outputs, env.__getitem__))
    return GraphModule(module, graph)
