"""The order dual_pipe_v, DualPipeV: two stages per rank in a V, which micro-batches pass in two directions.

Sources: https://github.com/deepseek-ai/DualPipe; `ScheduleDualPipeV` of torch.distributed.pipelining.

In the middle of the step, a forward in one of a rank's stages is followed by the backward of another micro-batch in the
other stage. The two are independent, so one may run while the other waits for its all-to-alls. This file states the
order alone: each action ends before the next begins.

If a forward and both parts of a backward take equally long, rank r waits num_ranks - 1 actions in all. A rank keeps the
activations of at most 2 * num_ranks + 1 forwards.
"""

from __future__ import annotations

from bitproof.harness.case import Schedule
from bitproof.harness.graph.staged.actions import Action, actions_from

_BACKWARD = (["I0", "W0"], ["I1", "W1"])


def dual_pipe_v(schedule: Schedule, num_ranks: int, rank: int) -> list[Action]:
    """Return a rank's actions. There must be at least as many micro-batches as stages.

    For example, on the last of 2 ranks, with 4 micro-batches (the digits are the rank's stages; `actions_from` explains
    the letters): F0 F1 F0 F1, F0 I1 W1 F1 I0 W0, F0 I1 W1 F1 I0 W0, I1 W1 I0 W0, I1 I0 W1 W0.
    """
    later = num_ranks - 1 - rank
    # Fill the V.
    names = ["F0"] * (2 * later) + ["F0", "F1"] * (rank + 1) + ["I1", "W1", "F1"] * later
    # Each forward has the backward of another micro-batch beside it.
    pairs = ["F0", *_BACKWARD[1], "F1", *_BACKWARD[0]]
    names += pairs * (schedule.micro_batches - num_ranks - later) + pairs[1:] * later
    # Backwards alone: first whole ones; then weights wait, so that inputs are early for other ranks.
    stages = [1, 0] * (rank + 1)
    names += [name for stage in stages[: rank + 1] for name in _BACKWARD[stage]]
    waiting = [*stages[rank + 1 :], *[0] * later]
    names += [f"I{stage}" for stage in stages[rank + 1 :]]
    names += [name for stage in waiting[:later] for name in (f"W{stage}", "I0")]
    names += [f"W{stage}" for stage in waiting[later:]]
    return actions_from(names, schedule.stage_map(num_ranks).stages_of(rank))
