"""A placement problem: take a choice for each node, so that costs are least and memory stays within a limit.

    node   has choices, each with a cost and the bytes that a rank stores for it
    edge   connects two nodes: a cost for each pair of their choices, infinite for a pair that is not allowed
    limit  on the sum of bytes

Parameters, operators and layers are all nodes. For example, a parameter must be split if its layer is split: the edge
between them costs 0 for allowed pairs, and infinity for others. Costs are microseconds of a rank's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Matrix = np.ndarray
"""An array of shape (choices of the first node, choices of the second)."""


@dataclass(frozen=True)
class Choice:
    """A choice of a node: its name, its cost, and the bytes that a rank stores for it."""

    name: str
    cost: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Taken:
    """A choice for each node. `choices` has its index by the node's name; `cost` and `bytes` are the totals."""

    choices: Mapping[str, int]
    cost: float
    bytes: float


@dataclass
class PlacementProblem:
    """Nodes by name, and edges by the names of their two nodes. The order of the nodes is fixed.

    If an edge is added twice, its costs are added.
    """

    nodes: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    edges: dict[tuple[str, str], Matrix] = field(default_factory=dict)

    def add_node(self, name: str, choices: Sequence[Choice]) -> None:
        assert choices and name not in self.nodes
        self.nodes[name] = tuple(choices)

    def add_edge(self, first: str, second: str, costs: Matrix) -> None:
        """Add an edge between existing nodes. `costs` has a row for each choice of `first`, a column for each of
        `second`."""
        assert costs.shape == (len(self.nodes[first]), len(self.nodes[second]))
        known = self.edges.get((first, second))
        self.edges[first, second] = costs if known is None else known + costs

    def take(self, choices: Mapping[str, int]) -> Taken:
        """Return `choices` (name of a node -> index of its choice) together with their total cost and bytes.

        Sums run in the order of nodes, then of edges.
        """
        taken = [self.nodes[name][choices[name]] for name in self.nodes]
        cost = sum(choice.cost for choice in taken)
        cost += sum(float(costs[choices[a], choices[b]]) for (a, b), costs in self.edges.items())
        return Taken(dict(choices), cost, sum(choice.bytes for choice in taken))

    def fixed(self, choices: Mapping[str, int]) -> PlacementProblem:
        """Return the same problem, but each node in `choices` keeps only the choice with the given index."""
        kept = {name: [choices[name]] if name in choices else range(len(all_)) for name, all_ in self.nodes.items()}
        nodes = {name: tuple(self.nodes[name][index] for index in kept[name]) for name in self.nodes}
        return PlacementProblem(
            nodes, {(a, b): costs[np.ix_(kept[a], kept[b])] for (a, b), costs in self.edges.items()}
        )
