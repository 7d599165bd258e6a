"""Finds the graph inputs that are parameters, and the path from an all-gather back to its parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from bitproof.harness.graph import operators

aten = torch.ops.aten

_TO_GATHER = operators.VIEWS | {aten._to_copy.default, aten.constant_pad_nd.default}


def parameters_of(graph: Graph) -> dict[Node, int]:
    """Return the graph inputs that are parameters, as node -> index.

    They are the first inputs. There are as many of them as the graph returns gradients.
    """
    outputs: Any = graph.output_node().args[0]
    # A stage's last output is a tuple of the values that it sends.
    gradients = [x for x in outputs[1:] if isinstance(x, Node)]
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    return {node: index for index, (node, _) in enumerate(zip(inputs, gradients, strict=False))}


def chain_to_input(launch: Node) -> list[Node]:
    """Return the nodes from the argument of the all-gather `launch` up to the parameter that it gathers.

    The parameter is the last node of the list. The nodes before it are views, casts and padding.
    """
    source = launch.args[0]
    assert isinstance(source, Node)
    chain = [source]
    while chain[-1].target in _TO_GATHER and len(chain[-1].all_input_nodes) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain
