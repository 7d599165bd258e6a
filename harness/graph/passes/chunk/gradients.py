"""Follows each gradient output back to the node that first computes the parameter's gradient.

The nodes in between cast, pad and reduce the gradient. Each has a single tensor input and a single reader.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.symbols import free_symbols

aten = torch.ops.aten


def gradient_outputs(output: Node) -> list[Node]:
    """Return the gradients: all outputs of a joint graph except the loss, which comes first."""
    return [node for node in output.args[0][1:] if isinstance(node, Node)]  # type: ignore[index, union-attr]


def reduction_tail(gradient: Node) -> list[Node]:
    """Return the nodes that reduce a gradient over ranks, last first: casts, pads, reduce-scatters and waits.

    A cast to a narrower dtype ends the list. The gradients of two chunks may be added before these nodes, and narrow(a)
    + narrow(b) is not narrow(a + b).
    """
    tail: list[Node] = []
    node = gradient
    # Only the output itself may have other readers: a value on the way with a second reader is needed as it is.
    while _continues(node) and (not tail or len(node.users) == 1):
        tail.append(node)
        node = node.all_input_nodes[0]
    # A view or padding at the start of the chain belongs to the computation of the gradient, not to its reduction.
    while tail and not _reduces_or_casts(tail[-1]):
        tail.pop()
    return tail


def _continues(node: Node) -> bool:
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or free_symbols(node.meta["val"]):
        return False
    return _reduces_or_casts(node) or node.target in operators.VIEWS or node.target is aten.constant_pad_nd.default


def _reduces_or_casts(node: Node) -> bool:
    if operators.is_wait(node) or (operators.is_collective(node) and _is_reduce_scatter(node)):
        return True
    return node.target is aten._to_copy.default and _widens(node)


def _is_reduce_scatter(node: Node) -> bool:
    return operators.operator_name(node).startswith("reduce_scatter")


def _widens(cast: Node) -> bool:
    before, after = cast.all_input_nodes[0].meta["val"].dtype, cast.meta["val"].dtype
    return before.is_floating_point and torch.promote_types(before, after) == after
