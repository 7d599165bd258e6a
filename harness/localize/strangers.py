"""Calls of an EQUAL candidate whose values the reference never had: what no compared tensor shows may still be wrong.

Passes write calls of their own, such as what packs a bucket, so a stranger is no defect. But a defect that later
rounding swallows, or that inputs hide, is one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from harness.localize.calls import Call
from harness.localize.packing import PACKING

MAX_TOLD = 20


class Stranger(NamedTuple):
    """A call, as `Call` writes it, and on how many ranks and how often in all it gave what the reference never had."""

    call: str
    ranks: int
    times: int


class Strangers(NamedTuple):
    """What a look at one step's logs came to: of all `calls` those that are strangers, and how many only pack."""

    step: int
    calls: int
    found: list[Stranger]
    packing: int

    def __str__(self) -> str:
        if not self.found:
            return f"--deep: each of {self.told_packing} gave values that the reference had too"
        told = [
            f"{stranger.call} x {stranger.times}" + (f" on {stranger.ranks} ranks" if stranger.ranks > 1 else "")
            for stranger in self.found[:MAX_TOLD]
        ]
        more = [f"and {len(self.found) - MAX_TOLD} more"] if len(self.found) > MAX_TOLD else []
        times = sum(stranger.times for stranger in self.found)
        return f"--deep: {times} of {self.told_packing} gave values that the reference never had: " + "; ".join(
            told + more
        )

    @property
    def told_packing(self) -> str:
        """How many calls were looked at."""
        packing = f", {self.packing} that only pack right values aside," if self.packing else ""
        return f"{self.calls:,} calls of step {self.step}{packing}"


def find_strangers(reference: Sequence[Sequence[Call]], candidate: Sequence[Sequence[Call]], step: int) -> Strangers:
    """Compare one step's logs, one a rank: each call of the candidate with an output that the reference had nowhere.

    In execution order of the first rank that has it. Views and what only puts right values together are counted apart.
    """
    times: Counter[str] = Counter()
    ranks: dict[str, set[int]] = {}
    packing = 0
    for rank, (known, calls) in enumerate(zip(reference, candidate, strict=True)):
        right = {value for call in known for value in (*call.inputs, *call.outputs, *call.aliases)}
        for call in calls:
            if right.issuperset(call.outputs):
                continue
            packs = call.view or call.operator.partition(".")[0] in PACKING
            if packs and right.issuperset(call.inputs):
                right.update(call.outputs)
                packing += 1
                continue
            times[str(call)] += 1
            ranks.setdefault(str(call), set()).add(rank)
    found = [Stranger(text, len(ranks[text]), count) for text, count in times.items()]
    return Strangers(step, sum(map(len, candidate)), found, packing)
