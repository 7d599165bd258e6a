"""Races in a finished graph: what reads a collective's result, or writes what it sends, before anything waited for it.

Where ranks meet in shared memory, or a machine has nothing else to do, such a graph may compute the right bits every
time; on a GPU it reads what a stream is still writing. So equal bits of it show nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from harness.graph import operators

MOST_TOLD = 3

_OF_LAYOUTS = ("sym_", "new_", "empty_like", "zeros_like", "ones_like", "full_like")
"""How operators begin that ask a value for its layout alone."""


def races(module: GraphModule) -> list[str]:
    """A line for each call that races with a collective, in the graph's order; of many the first few, and how many."""
    found = [
        line
        for name, nested in module.named_modules()
        if isinstance(nested, GraphModule)
        for line in _races(nested, f" (nested graph {name})" if name else "")
    ]
    left = len(found) - MOST_TOLD
    return [*found[:MOST_TOLD], *([f"and {left} more"] if left > 0 else [])]


def _races(module: GraphModule, where: str) -> Iterator[str]:
    memory: dict[Node, Node] = {}
    brought: dict[Node, Node] = {}
    sent: dict[Node, set[Node]] = {}
    for node in module.graph.nodes:
        memory[node] = _memory_of(node, memory)
        if operators.is_wait(node):
            landed = operators.launch_of(node)
            brought.pop(memory[node], None)
            sent.pop(landed, None)
            continue
        reader = "the step's result" if node.op == "output" else f"`{node.name}`"
        if not _only_shows(node):
            for key in dict.fromkeys(memory[x] for x in node.all_input_nodes):
                if key in brought:
                    yield f"{reader} reads what `{brought[key].name}` brings, before anything waits for it{where}"
        if node.op != "call_function":
            continue
        written = {memory[x] for x in operators.written_arguments(node)}
        for launch, keys in sent.items():
            if keys & written:
                yield f"{reader} writes what `{launch.name}` sends, before anything waits for it{where}"
        if operators.is_functional_collective(node):
            sent[node] = {memory[x] for x in node.all_input_nodes}
            brought[memory[node]] = node
        elif node.target is operator.getitem and operators.is_functional_collective(node.all_input_nodes[0]):
            brought[node] = node.all_input_nodes[0]


def _memory_of(node: Node, memory: dict[Node, Node]) -> Node:
    """The node that stands for the memory of a value. Each result of a collective of several tensors has its own."""
    if node.op != "call_function":
        return node
    if node.target is operator.getitem and operators.is_functional_collective(node.all_input_nodes[0]):
        return node
    shared = operators.sharing_arguments(node)
    return memory[shared[0]] if shared else node


def _only_shows(node: Node) -> bool:
    """Whether a node reads no element of what it is given: a view, or one of several results."""
    if node.op != "call_function":
        return node.op != "output"
    if node.target is operator.getitem or operators.operator_name(node).startswith(_OF_LAYOUTS):
        return True
    return bool(operators.sharing_arguments(node)) and not operators.written_arguments(node)
