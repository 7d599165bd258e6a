"""Finds the regions of a step's graph to compile. A region has the nodes of a call of a chosen module.

Needs:    origins on the nodes (origin.py).
Promises: a region has a single module, direction and chunk; recomputed calls are in another region than the originals.
Leaves:   outside all regions: collectives and their waits, checks, in-place writes, sizes, and values computed only
          from parameters, such as their casts, which calls of other modules may share.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx import Graph, Node

from bitproof.harness.case import root_of
from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.parameters import parameters_of
from bitproof.harness.graph.origin import RECOMPUTED_KEY, origin_of
from bitproof.harness.graph.writer import CHUNK_KEY

RegionOf = Callable[[Node], str | None]


def marked_by(patterns: tuple[str, ...], graph: Graph) -> RegionOf:
    """Return a function that maps a node of `graph` to the name of its region; None outside regions.

    The module that contains the node, or a module around that, must match one of `patterns`. The first pattern that
    matches determines the region.
    """
    of_parameters = made_of_parameters(graph)

    def region_of(node: Node) -> str | None:
        # A nested graph belongs to the call that takes it.
        if node.op == "get_attr":
            return next((region for user in node.users if (region := region_of(user))), None)
        # Calls of other modules may share a value that is made only of parameters, such as a cast.
        if node in of_parameters or not _computes(node):
            return None
        module, direction = origin_of(node).module, origin_of(node).direction
        # Lazily: only the first matching pattern counts.
        roots = (root for pattern in patterns if module and (root := root_of(pattern, module)))
        if (root := next(roots, None)) is None:
            return None
        again = " again" if node.meta.get(RECOMPUTED_KEY) else ""
        return f"{root} {direction}{again}, chunk {node.meta.get(CHUNK_KEY)}"

    return region_of


def made_of_parameters(graph: Graph) -> set[Node]:
    found = set(parameters_of(graph))
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _computes(node: Node) -> bool:
    if node.op != "call_function" or operators.is_collective(node) or operators.is_wait(node):
        return False
    if operators.is_check(node) or operators.written_arguments(node):
        return False
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(x, Tensor) for x in value))
