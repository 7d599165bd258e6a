"""Drop unused nodes that tracing left behind.

Needs:    nothing.
Promises: same values, same order; fewer nodes.
Refuses:  nothing.

1. Replace `detach` by its argument, as its result has the same value, unless a call writes to the result.
2. Drop calls that have no readers and no effects, last first.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.dead_code import drop_dead_code
from bitproof.harness.graph.observation import copy_marks


def clean_up(module: GraphModule, context: PassContext) -> GraphModule:
    for node in module.graph.nodes:
        if _is_identity(node) and not any(_writes_to(user, node) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            # An observed value keeps its record when its node goes.
            copy_marks(node, node.args[0])
    drop_dead_code(module)
    return module


def _is_identity(node: Node) -> bool:
    row = operators.row_of(node.target)
    return node.op == "call_function" and row.is_identity and row.launch is None


def _writes_to(user: Node, node: Node) -> bool:
    return node in operators.written_arguments(user)
