"""State a placement problem: choose an option for each node, so that pairs are compatible and memory is bounded.

    node   has choices, each with a cost and the bytes that a rank stores for it
    edge   connects two nodes: a cost for each pair of their choices, infinite for incompatible pairs
    bound  on the total bytes

Parameters, operators and layers (split or whole) are all nodes. For example, an edge of zeros and infinities makes a
parameter's placement follow its layer's. Costs are microseconds of a rank's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Matrix = np.ndarray
"""An array of shape (choices of the first node, choices of the second)."""


@dataclass(frozen=True)
class Choice:
    """An option of a node: its name, cost, and bytes that a rank stores for it."""

    name: str
    cost: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Taken:
    """The chosen option of each node, by index; their total cost and bytes."""

    choices: Mapping[str, int]
    cost: float
    bytes: float


@dataclass
class PlacementProblem:
    """Nodes by name, in a fixed order, and edges by their two nodes; edges between the same nodes add up."""

    nodes: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    edges: dict[tuple[str, str], Matrix] = field(default_factory=dict)

    def add_node(self, name: str, choices: Sequence[Choice]) -> None:
        """Add a node with at least one choice."""
        assert choices and name not in self.nodes
        self.nodes[name] = tuple(choices)

    def add_edge(self, first: str, second: str, costs: Matrix) -> None:
        """Add an edge between existing nodes."""
        assert costs.shape == (len(self.nodes[first]), len(self.nodes[second]))
        known = self.edges.get((first, second))
        self.edges[first, second] = costs if known is None else known + costs

    def take(self, choices: Mapping[str, int]) -> Taken:
        """The cost and bytes of these choices. Sums run in the order of nodes, then of edges."""
        taken = [self.nodes[name][choices[name]] for name in self.nodes]
        cost = sum(choice.cost for choice in taken)
        cost += sum(float(costs[choices[a], choices[b]]) for (a, b), costs in self.edges.items())
        return Taken(dict(choices), cost, sum(choice.bytes for choice in taken))

    def fixed(self, choices: Mapping[str, int]) -> PlacementProblem:
        """The same problem, with only the given choice for some nodes."""
        kept = {name: [choices[name]] if name in choices else range(len(all_)) for name, all_ in self.nodes.items()}
        nodes = {name: tuple(self.nodes[name][index] for index in kept[name]) for name in self.nodes}
        return PlacementProblem(
            nodes, {(a, b): costs[np.ix_(kept[a], kept[b])] for (a, b), costs in self.edges.items()}
        )
