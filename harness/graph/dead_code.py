"""Removes calls without readers and without effects."""

from __future__ import annotations

from torch.fx import GraphModule

from bitproof.harness.graph import operators


def drop_dead_code(module: GraphModule) -> None:
    num_nodes = len(module.graph.nodes)
    # Last first: once a reader is erased, its inputs may have no reader left.
    for node in reversed(module.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not operators.has_effects(node):
            module.graph.erase_node(node)
    if len(module.graph.nodes) < num_nodes:
        module.recompile()
