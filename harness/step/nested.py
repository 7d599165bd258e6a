"""Nested graphs: the graphs that a call runs, and the call's operands for their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from bitproof.harness.graph import operators
from bitproof.harness.torch_compat import OpOverload

_CHOOSE = ("cond", "while_loop")


def graphs_of(node: Node) -> list[tuple[Node, GraphModule]]:
    """Return the nested graphs among the inputs of a call, as pairs (input, graph)."""
    return [(x, body) for x in node.all_input_nodes if (body := operators.graph_of(x)) is not None]


def body_of(node: Node) -> tuple[GraphModule, Sequence[Any]] | None:
    """Return (the graph that a call runs, an operand for each of its inputs).

    Returns None if the call runs no graph or several graphs, or if the operands are not known.
    """
    if node.op == "call_module":
        module = submodule_of(node)
        if not isinstance(module, GraphModule):
            return None
        names = [str(x.target) for x in module.graph.nodes if x.op == "placeholder"]
        return module, [*node.args, *(node.kwargs[name] for name in names[len(node.args) :] if name in node.kwargs)]
    if node.op != "call_function" or isinstance(node.target, OpOverload) or chooses_by_data(node):
        return None
    bodies = graphs_of(node)
    operands = operands_of(node, bodies[0][1]) if len(bodies) == 1 else None
    return None if operands is None else (bodies[0][1], operands)


def chooses_by_data(node: Node) -> bool:
    """Return whether a call chooses by data which of its nested graphs to run, or how often."""
    return operators.name_of(node.target) in _CHOOSE


def operands_of(node: Node, body: GraphModule) -> list[Any] | None:
    """Return the operands for the inputs of the nested graph `body`: the arguments of `node` after its graphs.

    Returns None if their number is not the number of inputs.
    """
    places = [place for place, x in enumerate(node.args) if isinstance(x, Node) and operators.graph_of(x) is not None]
    if not places:
        return None
    operands: list[Any] = []
    # Operands come in a list or one by one. A string among them, such as a graph's name, is no operand.
    for argument in node.args[places[-1] + 1 :]:
        operands += argument if isinstance(argument, (list, tuple)) else [] if isinstance(argument, str) else [argument]
    count = sum(inner.op == "placeholder" for inner in body.graph.nodes)
    return operands if len(operands) == count else None


def submodule_of(node: Node) -> nn.Module | None:
    """Return the module that a node of kind `call_module` calls; None if the graph's owner has no such module."""
    owner = node.graph.owning_module
    try:
        return owner.get_submodule(str(node.target)) if owner is not None else None
    except AttributeError:
        return None
