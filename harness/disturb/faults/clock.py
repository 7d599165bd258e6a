"""This process's rank and current step, for faults inside graphs and calls. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """This process's rank, world size and step. `memory` stores a fault's values from step to step."""

    rank: int = 0
    world_size: int = 1
    step: int = -1
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the last rank. Faults of a single rank change this rank only."""
        return self.rank == self.world_size - 1


NOW = Clock()
"""This process's clock. Each rank is a process, and sets it before its first step."""
