"""A run as its ranks see it: the request, the ranks' files, and the graph that was prepared before they were forked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitproof.harness.execute.requests import ARCHIVE, VALUES, RankSlots, RunRequest
from bitproof.harness.localize.logs.replay import Replay
from bitproof.harness.systems.graph_key import GraphCache

_COLLECTIVE_GRACE = 60.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A requested run: the ranks that this host process forks, and the graph that was prepared before the fork.

    - `program`: the graph; None if each rank prepares a graph or runs none.
    - `graph_cache`: stores graphs and results of checks for later runs; None if the ranks do not use it.
    """

    run: RunRequest
    rank_slots: RankSlots
    program: Any = None
    graph_cache: GraphCache | None = None

    @property
    def is_alone(self) -> bool:
        """Whether this host process forks all ranks of the run. False under torchrun."""
        return self.rank_slots.server is None

    @property
    def collective_timeout(self) -> float:
        # If ranks hang, the process that watches them acts first, and its error has the stacks of all ranks.
        return self.run.timeout + _COLLECTIVE_GRACE

    @property
    def watched(self) -> Replay | None:
        """The settings that say which calls the ranks log, in a replay or in a recorded run; None if they log no
        calls."""
        return self.run.replay or (self.run.watch.replay if self.run.watch else None)

    @property
    def steps(self) -> int:
        """The number of steps that the system has taken at the end of the run, including the steps before a resume."""
        resume, replay = self.run.resume, self.run.replay
        if resume is not None and not resume.goes_on:
            return resume.at
        return self.run.case.steps if replay is None else replay.step + 1

    @property
    def is_killed(self) -> bool:
        """Whether ranks are killed after their last step, because the next run must resume from their saved state."""
        return self.run.resume is not None and not self.run.resume.goes_on

    @property
    def first_step(self) -> int:
        """The index of the run's first step: 0, or higher if the run resumes from saved state."""
        resume = self.run.resume
        return resume.at if resume is not None and resume.goes_on else 0

    @property
    def is_timed(self) -> bool:
        # Only recording slows the steps of such a run, and its time is subtracted.
        return self.run.is_first and self.run.options.stress is None

    def device_index_of(self, rank: int) -> int:
        return rank if self.rank_slots.gpu is None else self.rank_slots.gpu

    def part_of(self, rank: int) -> Path:
        return Path(self.rank_slots.part.format(rank=rank))

    def archive_of(self, rank: int) -> Path:
        return self.part_of(rank) if self.run.replay else self.part_of(rank).with_suffix(ARCHIVE)

    def profile_of(self, rank: int) -> Path | None:
        return self.run.profile / f"rank{rank}.json" if self.run.profile else None

    def values_of(self, rank: int) -> Path:
        return self.part_of(rank).with_suffix(VALUES)
