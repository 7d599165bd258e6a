"""The order zbv, ZB-V: two stages per rank in a V, and no rank idle between its first and its last action.

Sources: section 6 of https://arxiv.org/abs/2401.10241; `ScheduleZBVZeroBubble` of torch.distributed.pipelining.

If a forward and both parts of a backward take equally long, only the start and the end are staggered: rank r begins r
actions later than rank 0, and ends r actions later. A rank keeps the activations of at most 2 * num_ranks forwards, as
much memory as under 1F1B, whose stages are twice as large.
"""

from __future__ import annotations

from bitproof.harness.case import Schedule
from bitproof.harness.graph.staged.actions import Action, actions_from


def zbv(schedule: Schedule, num_ranks: int, rank: int) -> list[Action]:
    """Return a rank's actions. There must be at least as many micro-batches as stages.

    For example, on the last of 2 ranks, with 4 micro-batches (the digits are the rank's stages; `actions_from` explains
    the letters): F0 F1 F0 F1 I1 W1, F0 I0 W0 F1 I1 W1, F0 I0 W0 F1 I1 W1, I0 I1 I0 W0 W1 W0.
    """
    count, onward = schedule.micro_batches, num_ranks - rank  # `onward`: this rank and all later ones
    names = ["F0"] * (2 * onward - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * onward
    for left in reversed(range(count - num_ranks)):
        # The first stage has run onward - 1 more forwards than the second one, so its forwards end earlier.
        names += ["F0", "I0", "W0", "F1", "I1", "W1"] if left > onward - 2 else ["I0", "W0", "F1", "I1", "W1"]
    # Weights wait for the end of the step, where no forwards are left to fill the time between inputs.
    names += ["I0", "I1"] * rank + ["I0", "W0"] * onward + ["W1"] * rank + ["W0"] * rank
    return actions_from(names, schedule.stage_map(num_ranks).stages_of(rank))
