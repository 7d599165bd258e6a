"""Passes that leave a region wrong which Inductor compiles afterwards."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule


def attend_to_later_positions(module: GraphModule, context: Any) -> GraphModule:
    """Let SDPA and its backward see later positions."""
    nodes = [node for node in module.graph.nodes if "scaled_dot_product" in str(node.target)]
    for node in nodes:
        node.args = tuple(False if x is True else x for x in node.args)
        node.kwargs = {name: False if x is True else x for name, x in node.kwargs.items()}
    assert nodes, "the step has SDPA"
    module.recompile()
    return module


def add_too_much_in_a_norm(module: GraphModule, context: Any) -> GraphModule:
    """Let a norm that is a region add too much to its mean of squares."""
    node = next(node for node in module.graph.nodes if "rsqrt" in str(node.target))
    added = node.args[0]
    added.args = (added.args[0], 0.1)
    module.recompile()
    return module
