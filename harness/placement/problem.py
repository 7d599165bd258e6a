"""A choice for each of many nodes, where some go together and others do not: the form that placements are solved in.

    node   has choices, each with a cost and with bytes that a rank holds for it; one of them is taken
    edge   joins two nodes: a cost for each pair of their choices, infinite where the two do not go together
    bound  on the sum of bytes of what is taken

Nothing else is in it: a parameter, an operator and a layer that is split or not are nodes alike, and that a parameter's
placement follows its layer's is an edge of zeros and infinities. Costs are microseconds of a step of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Matrix = np.ndarray
"""(choices of the first node, choices of the second)."""


@dataclass(frozen=True)
class Choice:
    """What a node may be: what it means in words, its cost, and the bytes that a rank holds for it."""

    name: str
    cost: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Taken:
    """One choice a node, by its index; what all of that costs, and the bytes that a rank holds."""

    choices: Mapping[str, int]
    cost: float
    bytes: float


@dataclass
class PlacementProblem:
    """Nodes by name, in a fixed order, and edges by the two that they join; edges between the same two add up."""

    nodes: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    edges: dict[tuple[str, str], Matrix] = field(default_factory=dict)

    def add_node(self, name: str, choices: Sequence[Choice]) -> None:
        """A node with at least one choice."""
        assert choices and name not in self.nodes
        self.nodes[name] = tuple(choices)

    def add_edge(self, first: str, second: str, costs: Matrix) -> None:
        """An edge between nodes that are there."""
        assert costs.shape == (len(self.nodes[first]), len(self.nodes[second]))
        known = self.edges.get((first, second))
        self.edges[first, second] = costs if known is None else known + costs

    def take(self, choices: Mapping[str, int]) -> Taken:
        """The cost and bytes of a choice for every node. Sums run in the order of nodes, then of edges."""
        taken = [self.nodes[name][choices[name]] for name in self.nodes]
        cost = sum(choice.cost for choice in taken)
        cost += sum(float(costs[choices[a], choices[b]]) for (a, b), costs in self.edges.items())
        return Taken(dict(choices), cost, sum(choice.bytes for choice in taken))

    def fixed(self, choices: Mapping[str, int]) -> PlacementProblem:
        """The same program in which some nodes have but one choice left."""
        kept = {name: [choices[name]] if name in choices else range(len(all_)) for name, all_ in self.nodes.items()}
        nodes = {name: tuple(self.nodes[name][index] for index in kept[name]) for name in self.nodes}
        return PlacementProblem(
            nodes, {(a, b): costs[np.ix_(kept[a], kept[b])] for (a, b), costs in self.edges.items()}
        )
