"""The order of a rank's actions as plain data: forwards and backwards of micro-batches through its stages.

In every schedule, a stage's forwards take micro-batches in order, and so do its backwards. So gradients are added in
that order, and messages arrive in the order in which the next stage reads them.
"""

from __future__ import annotations

from typing import NamedTuple

from bitproof.harness.case import Schedule
from bitproof.harness.graph.analysis.halves import Half


class Action(NamedTuple):
    """A step of a rank's work: the forward or the backward of a stage, for a micro-batch."""

    half: Half
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.half} of micro-batch {self.micro_batch} in stage {self.stage}"


def actions_of(schedule: Schedule, num_ranks: int, rank: int) -> list[Action]:
    """Return the actions of a pipeline's rank, in order. The pipeline has `num_ranks` ranks.

    Under 1f1b (https://arxiv.org/abs/2104.04473) the first backward runs as soon as the first micro-batch can have
    returned. For example, with 2 ranks and 3 micro-batches, rank 0 runs F0 F1 B0 F2 B1 B2.
    """
    count, several = schedule.micro_batches, schedule.stages_per_rank
    total = count * several

    def at(turn: int, half: Half) -> Action:
        """Return the rank's forward or backward number `turn`, counted from 0."""
        # In a lap, `num_ranks` micro-batches pass through all stages of the rank; backwards take the last stage first.
        lap, place = divmod(turn, num_ranks * several)
        own, micro_batch = divmod(place, num_ranks) if several > 1 else (0, place)
        own = own if half == "forward" else several - 1 - own
        return Action(half, own * num_ranks + rank, lap * num_ranks + micro_batch)

    # Forwards before the first backward: one for each later rank, more if stages are interleaved.
    behind = num_ranks - 1 - rank
    ahead = total if schedule.order == "gpipe" else behind if several == 1 else 2 * behind + (several - 1) * num_ranks
    ahead = min(ahead, total)
    found = [at(turn, "forward") for turn in range(ahead)]
    for turn in range(total):
        if ahead + turn < total:
            found.append(at(ahead + turn, "forward"))
        found.append(at(turn, "backward"))
    return found
