"""A rank's part in a run of a system with another layout: collects or reorders the rank's sums, or computes in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bitproof.harness.powers.two_layouts.meetings import Sums
from bitproof.harness.powers.two_layouts.reordered_sums import regrouped
from bitproof.harness.powers.two_layouts.widen import Widened, computed_in_float64
from bitproof.harness.records.layout import Across


class InRank:
    """The dispatch modes, on this rank, of a run that compares two layouts. `step` returns the current step."""

    def __init__(self, across: Across, rank: int, step: Callable[[], int]) -> None:
        self.sums = Sums()
        self.widened = Widened() if across.in_float64 else None
        self._regrouped = regrouped(across.regroup, rank, step)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        # The last mode sees a call first, so `sums` sees calls as the system made them.
        with computed_in_float64(self.widened), self._regrouped, self.sums.at_work():
            yield
