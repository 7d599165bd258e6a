"""Simulates a graph in a given order, on a rank that computes while collectives are in flight.

- A collective's launch occupies the rank. Its transfer starts as soon as no other transfer of its group is in flight.
- A wait blocks the rank until the transfer has arrived.
- Any other node runs at once: there is no launch queue. All ranks run at the same pace.

For example, a launch of 1 s, a transfer of 5 s, 3 s of other compute, and a wait take 6 s: 3 s of the transfer are
hidden.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from torch.fx import Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.expert_exchanges import is_exchange
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.passes.overlap.costs import Cost


class Timeline:
    """The simulated clock of a rank, in the unit of the costs.

    - `time`: the time after the nodes that have run.
    - `arrival`: launch -> the time at which the collective arrives.
    - `blocked`: launch -> the time for which waits for the collective blocked the rank.
    """

    def __init__(self, costs: Mapping[Node, Cost]) -> None:
        self.costs = costs
        self.time = 0.0
        self.arrival: dict[Node, float] = {}
        self.blocked: dict[Node, float] = {}
        self._free: dict[str, float] = {}
        self._stops = [0.0]
        self._blocked_totals = [0.0]
        """`_stops`: the times at which waits began to block. `_blocked_totals`: the total blocked time after each."""

    def run(self, node: Node) -> None:
        """Advance the clock by the time that a node takes. The nodes that it reads must have run before."""
        if operators.is_wait(node):
            self._wait_for(operators.launch_of(node))
        self.time += self.costs[node].compute
        if operators.is_collective(node):
            group = operators.group_name(node)
            start = max(self.time, self._free.get(group, 0.0))
            self.arrival[node] = self._free[group] = start + self.costs[node].transfer

    def has_arrived(self, launch: Node) -> bool:
        return self.arrival.get(launch, 0.0) <= self.time

    def hidden(self, launch: Node) -> float:
        """Return the time for which a collective's transfer overlapped with compute.

        While the rank is blocked in a wait, for this collective or another, nothing overlaps.
        """
        arrival, transfer = self.arrival[launch], self.costs[launch].transfer
        return transfer - (self._blocked_until(arrival) - self._blocked_until(arrival - transfer))

    def hidden_fraction(self, launches: Iterable[Node]) -> float:
        """Return the fraction of the collectives' transfer time that overlapped with compute; 0 without any transfer
        time.
        """
        launches = list(launches)
        seconds = sum((self.costs[node].transfer for node in launches), 0.0)
        # Adding zero turns -0.0 into 0.0.
        return round(sum(map(self.hidden, launches), 0.0) / seconds, 6) + 0.0 if seconds else 0.0

    def summary(self) -> dict[str, float | dict[str, float]]:
        """Return the numbers for the report.

        - `step_seconds`: the step's time.
        - `forward`, `backward`: for their all-to-alls, the total seconds, the seconds that blocked the rank, and the
          seconds and the fraction that compute has hidden.
        """
        return {"step_seconds": round(self.time, 9)} | {
            name: self._all_to_alls(name) for name in ("forward", "backward")
        }

    def _all_to_alls(self, direction: str) -> dict[str, float]:
        launches = [node for node in self.arrival if is_exchange(node) and origin_of(node).direction == direction]
        seconds = sum((self.costs[node].transfer for node in launches), 0.0)
        blocked = sum((self.blocked.get(node, 0.0) for node in launches), 0.0)
        hidden = sum(map(self.hidden, launches), 0.0)
        return {
            "all_to_all_seconds": round(seconds, 9),
            "blocked_seconds": round(blocked, 9),
            "hidden_seconds": round(hidden, 9),
            "hidden_fraction": self.hidden_fraction(launches),
        }

    def _wait_for(self, launch: Node) -> None:
        seconds = self.arrival.get(launch, 0.0) - self.time
        if seconds > 0:
            self._stops.append(self.time)
            self._blocked_totals.append(self._blocked_totals[-1] + seconds)
            self.blocked[launch] = self.blocked.get(launch, 0.0) + seconds
            self.time += seconds

    def _blocked_until(self, time: float) -> float:
        """Return the total time for which waits blocked the rank from the start until `time`, which has passed."""
        # `time` may be within the last wait before it: then only the part of that wait up to `time` counts.
        last = bisect.bisect_right(self._stops, time) - 1
        return min(self._blocked_totals[last], self._blocked_totals[max(last - 1, 0)] + time - self._stops[last])


def simulate(nodes: Iterable[Node], costs: Mapping[Node, Cost]) -> Timeline:
    timeline = Timeline(costs)
    for node in nodes:
        timeline.run(node)
    return timeline
