"""The order of each rank's actions in a step, as plain data.

In every order, a stage's forwards take micro-batches in ascending order, and so does each part of its backwards. So
gradients are added in that order, and messages arrive in the order in which the next stage reads them.
"""

from __future__ import annotations

from bitproof.harness.case import Schedule
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.orders.dual_pipe_v import dual_pipe_v
from bitproof.harness.graph.staged.orders.loop import loop
from bitproof.harness.graph.staged.orders.zbv import zbv


def actions_of(schedule: Schedule, num_ranks: int, rank: int) -> list[Action]:
    """Return the actions of a pipeline's rank, in order. The pipeline has `num_ranks` ranks.

    For example, with 2 ranks and 3 micro-batches, rank 0 runs F0 F1 B0 F2 B1 B2 under 1f1b: F is a forward, B a
    backward, the number a micro-batch.
    """
    in_order = {"zbv": zbv, "dual_pipe_v": dual_pipe_v}.get(schedule.order, loop)
    return in_order(schedule, num_ranks, rank)
