"""The optimum found by trying everything, which the solver is held against: for programs of a dozen nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bitproof.harness.placement.problem import PlacementProblem, Taken


def every_choice(program: PlacementProblem) -> Iterator[Taken]:
    """All that can be taken, one after another."""
    names = list(program.nodes)
    before = {
        name: [(a, b, costs) for (a, b), costs in program.edges.items() if names[max(map(names.index, (a, b)))] == name]
        for name in names
    }

    def extend(chosen: dict[str, int], left: list[str]) -> Iterator[Taken]:
        if not left:
            yield program.take(chosen)
            return
        name = left[0]
        for index in range(len(program.nodes[name])):
            now = {**chosen, name: index}
            if all(math.isfinite(costs[now[a], now[b]]) for a, b, costs in before[name]):
                yield from extend(now, left[1:])

    return extend({}, names)


def brute_force(program: PlacementProblem, bound: float = math.inf) -> Taken | None:
    """The cheapest that keeps the bound, found by trying everything; None where nothing does."""
    fitting = (taken for taken in every_choice(program) if taken.bytes <= bound)
    return min(fitting, key=lambda taken: taken.cost, default=None)
