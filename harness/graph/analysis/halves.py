"""The two halves of a step's graph: forward's calls, then backward's, and what lives across the border between them.

A graph that was partitioned (passes/partition.py) says of each call in which half it runs. It stays one graph, so that
every pass reads and writes it as any other; none of the list takes a call across the border. `divide` gives each
half as a graph of its own, for a backend.

A half is where a call runs, a direction is what it is for: backward may run a forward call again, or one that forward
itself does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Graph, GraphModule, Node

from bitproof.harness.graph.origin import origin_of

Half = Literal["forward", "backward"]

HALF_KEY = "half"
"""Where a call's metadata says in which half of a partitioned graph it runs; absent in any other graph."""


def half_of(node: Node) -> Half:
    """The half in which a call runs: by its direction, in a graph that nobody partitioned."""
    half: Half = node.meta.get(HALF_KEY) or origin_of(node).direction
    return half


def is_partitioned(graph: Graph) -> bool:
    """Whether calls say in which half they run."""
    return any(HALF_KEY in node.meta for node in graph.nodes)


def put_in(node: Node, half: Half) -> None:
    """Let a call say that it runs in a half, where calls of its graph say so."""
    if HALF_KEY in node.meta:
        node.meta[HALF_KEY] = half


@dataclass(frozen=True)
class Halves:
    """A step as two graphs. `saved` are the names of what backward reads of forward's values, `read_again` those of
    graph inputs that it reads.

    forward   graph inputs -> the loss, then what is saved
    backward  what is saved, then graph inputs that it reads again -> gradients
    """

    forward: GraphModule
    backward: GraphModule
    saved: list[str]
    read_again: list[int]


def run_halves(forward: Any, backward: Any, read_again: Sequence[int], *inputs: Any) -> tuple[Any, ...]:
    """A step, by what a backend made of each half: the loss, then gradients. `read_again` as in `Halves`."""
    loss, *saved = forward(*inputs)
    return (loss, *backward(*saved, *(inputs[index] for index in read_again)))


def divide(module: GraphModule) -> Halves:
    """The two halves of a partitioned graph, whose outputs are the loss and gradients; `module` stays as it is.

    A call that says nothing, as a user's pass may write one, runs where it stands.
    """
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    outputs: Any = graph.output_node().args[0]
    loss, *gradients = outputs
    border = next(index for index, node in enumerate(calls) if node.meta.get(HALF_KEY) == "backward")
    of_forward, of_backward = calls[:border], calls[border:]
    needed = {x for node in of_backward for x in node.all_input_nodes} | set(gradients)
    is_saved = [node for node in of_forward if node in needed]
    read_again = [node for node in inputs if node in needed]
    return Halves(
        forward=written(module, inputs, of_forward, [loss, *is_saved]),
        backward=written(module, [*is_saved, *read_again], of_backward, gradients),
        saved=[node.name for node in is_saved],
        read_again=[inputs.index(node) for node in read_again],
    )


def written(module: GraphModule, inputs: list[Node], calls: list[Node], outputs: list[Any]) -> GraphModule:
    """A graph of these calls of `module`, in their order, and of the nested graphs that they are handed.

    `inputs` are what the calls read besides, graph inputs or not.
    """
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in calls:
        for reference in node.all_input_nodes:
            if reference.op == "get_attr" and reference not in env:
                env[reference] = graph.node_copy(reference)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output([env[x] if isinstance(x, Node) else x for x in outputs])
    return GraphModule(module, graph)
