"""Counts the calls of a finished graph whose values are not recorded, so an error in them may go unnoticed.

By default, only the graph's results and the observed activations are recorded and compared. `--every-call` compares all
values.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from bitproof.harness.graph.observation import observed


def count_uncompared(module: GraphModule) -> tuple[int, int]:
    """Return (number of calls whose values are not compared, number of all calls that return a value)."""
    calls = {node for node in module.graph.nodes if node.op == "call_function" and not _is_no_call(node)}
    readers = [*module.graph.find_nodes(op="output"), *module.graph.find_nodes(op="call_function", target=observed)]
    compared = {_call_of(value) for reader in readers for value in reader.all_input_nodes}
    return len(calls - compared), len(calls)


def _is_no_call(node: Node) -> bool:
    return node.target in (operator.getitem, observed) or node.meta.get("val") is None


def _call_of(node: Node) -> Node:
    # `getitem` only takes a value from the tuple that a call returned.
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node
