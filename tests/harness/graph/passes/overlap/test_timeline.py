"""The simulator, on timelines worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from bitproof.harness.graph.passes.overlap.costs import Cost
from bitproof.harness.graph.passes.overlap.timeline import Timeline, simulate
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Plan:
    """A graph in the making, in which each node is added with its cost."""

    def __init__(self) -> None:
        self.sketch = Sketch()
        self.x = self.sketch.placeholder("x", 2, 4)
        self.costs: dict[Node, Cost] = {self.x: Cost(0, 0)}

    def compute(self, seconds: float, **where: Any) -> Node:
        return self._add(Cost(seconds, 0), aten.neg.default, self.x, **where)

    def launch(self, seconds: float, transfer: float, group: str = "ep", **where: Any) -> Node:
        call = c10d.all_to_all_single.default, self.x, [1, 1], [1, 1], group
        return self._add(Cost(seconds, transfer), *call, **where)

    def gather(self, transfer: float, group: str) -> Node:
        return self._add(Cost(0, transfer), c10d.all_gather_into_tensor.default, self.x, 2, group)

    def wait(self, launch: Node) -> Node:
        return self._add(Cost(0, 0), c10d.wait_tensor.default, launch)

    def play(self) -> Timeline:
        return simulate(self.sketch.graph.nodes, self.costs)

    def _add(self, cost: Cost, *call: Any, **where: Any) -> Node:
        node = self.sketch.call(*call, **where)
        self.costs[node] = cost
        return node


def test_a_wait_right_after_its_launch_hides_nothing() -> None:
    plan = Plan()
    plan.compute(2)
    launch = plan.launch(1, 10)
    plan.wait(launch)
    plan.compute(3)
    timeline = plan.play()
    assert timeline.time == 2 + 1 + 10 + 3
    assert (timeline.arrival[launch], timeline.blocked[launch], timeline.hidden(launch)) == (13, 10, 0)


def test_compute_between_launch_and_wait_hides_the_transfer() -> None:
    plan = Plan()
    launch = plan.launch(1, 10)
    plan.compute(4)
    plan.wait(launch)
    timeline = plan.play()
    assert (timeline.time, timeline.blocked[launch], timeline.hidden(launch)) == (11, 6, 4)


def test_a_transfer_that_arrived_long_ago_is_hidden_whole() -> None:
    plan = Plan()
    launch = plan.launch(1, 10)
    plan.compute(15)
    plan.wait(launch)
    timeline = plan.play()
    assert (timeline.time, timeline.blocked, timeline.hidden(launch)) == (16, {}, 10)


def test_a_group_carries_one_transfer_at_a_time_and_groups_do_not_mind_each_other() -> None:
    plan = Plan()
    first, second, other = plan.launch(0, 5), plan.launch(0, 5), plan.launch(0, 5, group="other")
    plan.compute(1)
    for launch in (other, first, second):
        plan.wait(launch)
    timeline = plan.play()
    assert [timeline.arrival[launch] for launch in (first, second, other)] == [5, 10, 5]
    assert timeline.blocked == {other: 4, second: 5}
    # The second is on its way from 5 to 10, while the rank stands; the others share one second of compute.
    assert [timeline.hidden(launch) for launch in (first, second, other)] == [1, 0, 1]


def test_standing_at_another_collectives_wait_hides_nothing() -> None:
    plan = Plan()
    launch = plan.launch(0, 10)
    plan.compute(2)
    plan.wait(plan.gather(6, "fsdp"))
    plan.compute(5)
    plan.wait(launch)
    timeline = plan.play()
    assert (timeline.time, timeline.blocked.get(launch, 0), timeline.hidden(launch)) == (13, 0, 4)


def test_the_summary_distinguishes_directions() -> None:
    plan = Plan()
    plan.wait(plan.launch(1, 4))
    launch = plan.launch(1, 8, backward=True)
    plan.compute(2)
    plan.wait(launch)
    plan.wait(plan.gather(6, "fsdp"))
    assert plan.play().summary() == {
        "step_seconds": 20.0,
        "forward": {"all_to_all_seconds": 4, "blocked_seconds": 4, "hidden_seconds": 0, "hidden_fraction": 0},
        "backward": {"all_to_all_seconds": 8, "blocked_seconds": 6, "hidden_seconds": 2, "hidden_fraction": 0.25},
    }
