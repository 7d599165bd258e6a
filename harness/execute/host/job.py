"""What every rank of one run is to do."""

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
    """A requested run, the ranks of it that start here, and what their host found out before it forked them.

    `program` is the prepared graph where a stage made it; otherwise each rank makes or reads its own. On the
    `graph_cache` an earlier run of the very same code left what need not be checked again.
    """

    run: RunRequest
    rank_slots: RankSlots
    program: Any = None
    graph_cache: GraphCache | None = None

    @property
    def is_alone(self) -> bool:
        """Whether all ranks of the run start here, and none in processes of others."""
        return self.rank_slots.server is None

    @property
    def collective_timeout(self) -> float:
        """Seconds; longer than the run's limit, because the watcher of the ranks can report more about a hang than a
        collective."""
        return self.run.timeout + _COLLECTIVE_GRACE

    @property
    def watched(self) -> Replay | None:
        """Which calls of a step the ranks log, in a replay or while they record."""
        return self.run.replay or (self.run.watch.replay if self.run.watch else None)

    @property
    def steps(self) -> int:
        """How many steps have been taken when the run ends."""
        resume, replay = self.run.resume, self.run.replay
        if resume is not None and not resume.goes_on:
            return resume.at
        return self.run.case.steps if replay is None else replay.step + 1

    @property
    def is_killed(self) -> bool:
        """Whether the ranks are killed once all have done their steps: another run goes on from what they saved."""
        return self.run.resume is not None and not self.run.resume.goes_on

    @property
    def first_step(self) -> int:
        """The run's first step: not 0 where it goes on from what an earlier one saved."""
        resume = self.run.resume
        return resume.at if resume is not None and resume.goes_on else 0

    @property
    def is_timed(self) -> bool:
        """Whether steps are timed: those of a first run, which nothing slows but what it records."""
        return self.run.is_first and self.run.options.stress is None

    def device_index_of(self, rank: int) -> int:
        """The number that chooses a rank's GPU."""
        return rank if self.rank_slots.gpu is None else self.rank_slots.gpu

    def part_of(self, rank: int) -> Path:
        """The file that a rank records into."""
        return Path(self.rank_slots.part.format(rank=rank))

    def archive_of(self, rank: int) -> Path:
        """The file into which a rank logs the calls of a step."""
        return self.part_of(rank) if self.run.replay else self.part_of(rank).with_suffix(ARCHIVE)

    def profile_of(self, rank: int) -> Path | None:
        """The file of a rank's profile, when the run is profiled."""
        return self.run.profile / f"rank{rank}.json" if self.run.profile else None

    def values_of(self, rank: int) -> Path:
        """The file that a rank writes its values into, when it keeps them."""
        return self.part_of(rank).with_suffix(VALUES)
