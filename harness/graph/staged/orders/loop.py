"""The orders of stages in a loop: gpipe, 1f1b and zero_bubble."""

from __future__ import annotations

from bitproof.harness.case import Schedule
from bitproof.harness.graph.analysis.halves import Half
from bitproof.harness.graph.staged.actions import Action


def loop(schedule: Schedule, num_ranks: int, rank: int) -> list[Action]:
    """Return a rank's actions.

    Under 1f1b (https://arxiv.org/abs/2104.04473) the first backward runs as soon as the first micro-batch can have
    returned. For example, with 2 ranks and 3 micro-batches, rank 0 runs F0 F1 B0 F2 B1 B2.

    Under zero_bubble (ZB-H1, https://arxiv.org/abs/2401.10241) each backward is divided into the parts "input" (I) and
    "weights" (W). Rank r runs W of a micro-batch after I of r later micro-batches, when it would otherwise wait. For
    example, rank 1 runs F0 I0 F1 I1 W0 F2 I2 W1 W2.
    """
    count, several = schedule.micro_batches, schedule.stages_per_rank
    total, stages = count * several, schedule.stage_map(num_ranks).stages_of(rank)

    def at(turn: int, half: Half) -> Action:
        """Return the rank's forward or backward number `turn`, counted from 0."""
        # In a lap, `num_ranks` micro-batches pass through all stages of the rank; backwards take the last stage first.
        lap, place = divmod(turn, num_ranks * several)
        own, micro_batch = divmod(place, num_ranks) if several > 1 else (0, place)
        own = own if half == "forward" else several - 1 - own
        return Action(half, stages[own], lap * num_ranks + micro_batch)

    # Forwards before the first backward: one for each later rank, more if stages are interleaved.
    behind = num_ranks - 1 - rank
    ahead = total if schedule.order == "gpipe" else behind if several == 1 else 2 * behind + (several - 1) * num_ranks
    ahead = min(ahead, total)
    found = [at(turn, "forward") for turn in range(ahead)]
    for turn in range(total):
        if ahead + turn < total:
            found.append(at(ahead + turn, "forward"))
        found.append(at(turn, "backward"))
    return _divided(found, behind=rank) if schedule.order == "zero_bubble" else found


def _divided(actions: list[Action], behind: int) -> list[Action]:
    """Divide each backward into its parts "input" and "weights".

    The part "weights" runs after the parts "input" of `behind` later backwards, or at the end.
    """
    found, waiting = list[Action](), list[Action]()
    for action in actions:
        if action.half == "forward":
            found.append(action)
            continue
        found.append(action._replace(part="input"))
        waiting.append(action._replace(part="weights"))
        if len(waiting) > behind:
            found.append(waiting.pop(0))
    return found + waiting
