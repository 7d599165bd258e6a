"""Finds the dependencies between the nodes of a graph, and sorts a graph as far as they allow.

A node depends on its inputs. Effects add dependencies between nodes that do not read each other:

- A write to memory depends on the memory's earlier readers and its previous writer.
- A read depends on the memory's last writer.
- A random draw depends on the previous draw.

A collective reads its input until its wait, so a later write to that input must stay after the wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from bitproof.harness.graph import operators
from bitproof.harness.step.storages import Storages


def dependencies(graph: Graph) -> dict[Node, set[Node]]:
    """Return a dict: each node -> the nodes on which it depends directly.

    For example, in `y = x.add(1); x.mul_(2)`, the `mul_` depends on the `add`, because `mul_` writes the memory that
    `add` reads.
    """
    storages = Storages(graph.nodes)
    readers: dict[Node, set[Node]] = {}
    writer: dict[Node, Node] = {}
    last_draw: Node | None = None
    found: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        before = found[node] = set(node.all_input_nodes)
        # Views share memory, so readers and writers are kept for each storage, and not for each value.
        written = storages.written_by(node)
        # A wait counts as a reader of the collective's input, so that no write to it moves before the wait.
        in_flight = operators.launch_of(node).all_input_nodes if operators.is_wait(node) else []
        for owner in storages.of((*node.all_input_nodes, *in_flight)):
            if owner in writer:
                before.add(writer[owner])
            # Earlier readers must not see the new value; later ones depend on this writer, so the set begins again.
            if owner in written:
                before |= readers.pop(owner, set())
                writer[owner] = node
            readers.setdefault(owner, set()).add(node)
        if operators.is_random(node):
            if last_draw is not None:
                before.add(last_draw)
            last_draw = node
        before.discard(node)
    return found


def reorder(module: GraphModule, key: Callable[[Node], Any] | None = None) -> None:
    """Sort a graph's nodes by `key`, as far as dependencies allow. Without a key, nodes move only if they must.

    Placeholders stay first, and the output stays last. Nodes with equal keys keep their order.
    """
    nodes = list(module.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    before = dependencies(module.graph)
    # A topological sort: `waiting` counts the nodes that a node still waits for, and `ready` is a heap of those that
    # wait for none.
    after: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node, needed in before.items():
        for earlier in needed:
            after[earlier].append(node)
    waiting = {node: len(needed) for node, needed in before.items()}

    def entry(node: Node) -> tuple[int, Any, int]:
        # The position comes last, so that nodes with equal keys keep their order on every rank.
        rank = {"placeholder": 0, "output": 2}.get(node.op, 1)
        return rank, place[node] if key is None or rank != 1 else key(node), place[node]

    ready = [(*entry(node), node) for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for later in after[node]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (*entry(later), later))
    assert len(order) == len(nodes), "a cycle: a pass made a node read what depends on it"
    _place(order)


def _place(order: list[Node]) -> None:
    for earlier, later in itertools.pairwise(order):
        if earlier.next is not later:
            # `Node.append` moves a node that is already in the graph.
            earlier.append(later)
