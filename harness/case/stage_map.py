"""The rank of each pipeline stage."""

from __future__ import annotations

from typing import NamedTuple


class StageMap(NamedTuple):
    """Maps pipeline stages to ranks, and ranks to stages.

    Stages are placed on ranks in laps, from rank 0 to the last rank. In a V, every second lap goes back from the last
    rank to rank 0. For example, the ranks of stages 0 to 3 on two ranks:

    - in a loop: 0 1 0 1, so a rank's stages never are neighbours (unless there is one rank);
    - in a V: 0 1 1 0, so the last rank has two neighbouring stages, and rank 0 the first and the last stage.

    `per_rank` is the number of stages on each rank.
    """

    num_ranks: int = 1
    per_rank: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks."""
        return self.num_ranks * self.per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank with a stage."""
        lap, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.is_v and lap % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]
