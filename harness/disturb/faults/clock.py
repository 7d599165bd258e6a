"""This process's rank and current step, for faults inside graphs and calls. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """This process's rank, the number of ranks, and the current step; -1 before the first step.

    `memory` stores values that a fault carries from step to step.
    """

    rank: int = 0
    world_size: int = 1
    step: int = -1
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    # Faults on a single rank affect the last rank.
    def is_last_rank(self) -> bool:
        return self.rank == self.world_size - 1


NOW = Clock()
"""The clock of this process, which runs a single rank. It is set before the rank's first step."""
