"""Which rank this process is and which step it takes, for what a fault put into a graph or a call. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """This process's rank, of how many, and its step; `memory` is what a fault keeps from one step to the next."""

    rank: int = 0
    world_size: int = 1
    step: int = -1
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the rank that faults of one rank choose."""
        return self.rank == self.world_size - 1


NOW = Clock()
"""This process's own: ranks are processes, and set it before their first step."""
