"""How many calls of a finished graph give values that no record holds: a wrong one may be lost before a record.

Records hold what the graph returns, and the activations that it shows. All else is compared by `--every-call` alone.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from bitproof.harness.graph.observation import observed


def count_uncompared(module: GraphModule) -> tuple[int, int]:
    """The number of calls whose values are not compared, and of all calls that give values."""
    calls = {node for node in module.graph.nodes if node.op == "call_function" and not _is_no_call(node)}
    readers = [*module.graph.find_nodes(op="output"), *module.graph.find_nodes(op="call_function", target=observed)]
    compared = {_call_of(value) for reader in readers for value in reader.all_input_nodes}
    return len(calls - compared), len(calls)


def _is_no_call(node: Node) -> bool:
    return node.target in (operator.getitem, observed) or node.meta.get("val") is None


def _call_of(node: Node) -> Node:
    """The call that gave a value, by itself or among others."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node
