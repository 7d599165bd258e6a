"""In which order a rank works: forwards and backwards of micro-batches through its stages, as plain data.

Forwards and backwards of a stage take micro-batches in their order, whatever the schedule: so gradients are added in
that order, and what a stage sends the next comes in the order in which it is read.
"""

from __future__ import annotations

from typing import NamedTuple

from bitproof.harness.case import Schedule
from bitproof.harness.graph.analysis.halves import Half


class Action(NamedTuple):
    """A half of a stage's step, for one micro-batch."""

    half: Half
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.half} of micro-batch {self.micro_batch} in stage {self.stage}"


def actions_of(schedule: Schedule, num_ranks: int, rank: int) -> list[Action]:
    """The work of one of `num_ranks` pipeline ranks, in its order.

    A rank with several stages takes `num_ranks` micro-batches through one of them before it turns to the next. Under
    1f1b (https://arxiv.org/abs/2104.04473) its backwards begin once the first micro-batch can have come back.
    """
    count, several = schedule.micro_batches, schedule.stages_per_rank
    total = count * several

    def at(turn: int, half: Half) -> Action:
        """What comes at a half's turn."""
        lap, place = divmod(turn, num_ranks * several)
        own, micro_batch = divmod(place, num_ranks) if several > 1 else (0, place)
        own = own if half == "forward" else several - 1 - own
        return Action(half, own * num_ranks + rank, lap * num_ranks + micro_batch)

    behind = num_ranks - 1 - rank
    ahead = total if schedule.order == "gpipe" else behind if several == 1 else 2 * behind + (several - 1) * num_ranks
    ahead = min(ahead, total)
    found = [at(turn, "forward") for turn in range(ahead)]
    for turn in range(total):
        if ahead + turn < total:
            found.append(at(ahead + turn, "forward"))
        found.append(at(turn, "backward"))
    return found
