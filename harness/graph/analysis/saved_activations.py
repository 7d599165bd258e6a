"""Activations: values that forward computes and backward needs. The memory passes share these functions.

An activation's tag states whether it is saved, recomputed, or offloaded to host memory. Parameters, inputs and sizes
are no activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from bitproof.harness.case import root_of
from bitproof.harness.graph.analysis.halves import half_of
from bitproof.harness.graph.operators import attends, operator_name
from bitproof.harness.graph.origin import origin_of

Tag = Literal["save", "recompute", "offload"]

TAG_KEY = "memory"
"""The metadata key of an activation's tag."""

STANDS_FOR_KEY = "stands_for"
"""The metadata key of a value that replaces an activation in backward.

The value of the key is the activation's name.
"""


def is_backward(node: Node) -> bool:
    return node.op == "call_function" and half_of(node) == "backward"


def is_forward_value(node: Node) -> bool:
    value = node.meta.get("val")
    is_tensors = isinstance(value, (torch.Tensor, tuple, list))
    return node.op == "call_function" and is_tensors and half_of(node) == "forward"


def tag_of(node: Node) -> Tag | None:
    return node.meta.get(TAG_KEY)


def is_recomputed(node: Node) -> bool:
    return tag_of(node) == "recompute"


def names_to_save(node: Node) -> tuple[str, ...]:
    """Return the names in `Memory.save` that choose a call: its operator's name and, for attention, "attention"."""
    if node.op != "call_function":
        return ()
    return (operator_name(node), "attention") if attends(node) else (operator_name(node),)


def calls_to_save(graph: Graph, save: Sequence[str], blocks: str) -> dict[str, list[Node]]:
    """Return a dict: each entry of `save` -> the calls that it chooses, in the graph's order.

    - `save`: the field `Memory.save` of a case. The entry "mm/2" chooses every second call of `mm` in each block: the
      first, third, and so on.
    - `blocks`: a pattern of modules. Each match is a block of layers.
    """
    calls: dict[tuple[str, str], list[Node]] = {}
    for node in graph.nodes:
        if (block := block_of(node, blocks)) is not None and not is_backward(node):
            for name in names_to_save(node):
                calls.setdefault((name, block), []).append(node)
    found: dict[str, list[Node]] = {}
    for entry in save:
        name, _, every = entry.partition("/")
        of_blocks = [each[:: int(every or 1)] for (called, _), each in calls.items() if called == name]
        found[entry] = [node for each in of_blocks for node in each]
    return found


def first_needs(graph: Graph, recomputed: Callable[[Node], bool]) -> dict[Node, Node]:
    """Return a dict: each activation -> the first backward call that needs it.

    `recomputed` returns whether an activation is recomputed. A call that reads a recomputed activation also needs the
    inputs of the recomputation.
    """
    needs: dict[Node, Node] = {}
    for reader in filter(is_backward, graph.nodes):
        # A recomputed activation is computed for its first reader, so that reader also needs the activation's inputs.
        # Walk from each backward call to the activations that it needs, through those that are recomputed.
        waiting = list(reader.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if is_forward_value(node) and node not in needs:
                needs[node] = reader
                if recomputed(node):
                    waiting += node.all_input_nodes
    return needs


def block_of(node: Node, blocks: str) -> str | None:
    """Return the name of the block of layers that contains a call's module; None if there is none.

    `blocks` is a pattern of modules. For example, with layers.*, the module layers.3.mlp is in the block layers.3.
    """
    module = origin_of(node).module
    return root_of(blocks, module) if module and node.op == "call_function" else None


def block_starts(graph: Graph, blocks: str, of: Callable[[Node], bool]) -> list[Node]:
    """Return the first call of each block of layers, in the graph's order.

    Only nodes for which `of` returns True count. `blocks` is a pattern of modules, as for `block_of`.
    """
    starts: dict[Any, Node] = {}
    for node in graph.nodes:
        if of(node) and (block := block_of(node, blocks)) is not None:
            starts.setdefault(block, node)
    return list(starts.values())
