"""Finds which values of a graph share memory, and which calls write it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from torch.fx import Node

from bitproof.harness.graph.operators import written_arguments
from bitproof.harness.step.effects import shared_argument


class Storages:
    """The storages of a graph's values, and the calls that write them in place.

    A storage is named by its owner: the first node in it. For example, the owner of a view is its base. All results of
    a call count as a single storage.

    - `owners`: each node -> the owner of its storage.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = list(nodes)
        self.owners: dict[Node, Node] = {}
        for node in self._nodes:
            chain = []
            # The nodes need not be in topological order.
            while node not in self.owners:
                shared = shared_argument(node)
                chain.append(node)
                if shared is None:
                    self.owners[node] = node
                else:
                    node = shared
            self.owners.update(dict.fromkeys(chain, self.owners[node]))

    def is_view(self, node: Node) -> bool:
        """Return whether a node's value is in the storage of another value, as a view or a written argument is."""
        return self.owners[node] is not node

    def of(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the owners of the storages of some nodes."""
        return {self.owners[node] for node in nodes}

    def written_by(self, node: Node) -> set[Node]:
        """Return the owners of the storages that a call writes in place."""
        return self.of(written_arguments(node))

    @cached_property
    def writers(self) -> dict[Node, list[Node]]:
        """For the owner of each storage that calls write in place: these calls, in the graph's order."""
        found: dict[Node, list[Node]] = {}
        for node in self._nodes:
            for owner in self.written_by(node):
                found.setdefault(owner, []).append(node)
        return found
