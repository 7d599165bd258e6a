"""A rank's work in a pipeline: forwards and backwards of micro-batches through its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from bitproof.harness.graph.analysis.halves import Half


class Action(NamedTuple):
    """A step of a rank's work: the forward or the backward of a stage, for a micro-batch.

    `part` is "whole", unless a backward is divided. Its part "input" computes the gradient of the stage's input, for
    which the previous stage waits. Its part "weights" runs later, and computes the gradients of weights.
    """

    half: Half
    stage: int
    micro_batch: int
    part: Literal["whole", "input", "weights"] = "whole"

    def __str__(self) -> str:
        part = "" if self.part == "whole" else f" ({self.part})"
        return f"{self.half}{part} of micro-batch {self.micro_batch} in stage {self.stage}"

    @property
    def receiver(self) -> int:
        """The stage that reads this action's results: the next one, or the previous one if this is a backward.

        The first stage's backward and the last stage's forward have no receiver; the number is then outside all stages.
        """
        return self.stage + (1 if self.half == "forward" else -1)

    @property
    def sender(self) -> Action:
        """The same action in the stage whose results this action reads."""
        return self._replace(stage=self.stage + (-1 if self.half == "forward" else 1))


_PARTS: dict[str, tuple[Half, Literal["whole", "input", "weights"]]] = {
    "F": ("forward", "whole"),
    "I": ("backward", "input"),
    "W": ("backward", "weights"),
}


def actions_from(names: Iterable[str], stages: Sequence[int]) -> list[Action]:
    """Return actions from their short names. Equal names take micro-batches in ascending order.

    A name is a letter and the index of a stage in `stages`: F for a forward, I and W for the parts "input" and
    "weights" of a backward. For example, "F0 F0 I0" are two forwards, of micro-batches 0 and 1, and the first part of
    the backward of micro-batch 0, all in the first of the stages.
    """
    taken = Counter[str]()
    found = []
    for name in names:
        half, part = _PARTS[name[0]]
        found.append(Action(half, stages[int(name[1:])], taken[name], part))
        taken[name] += 1
    return found
