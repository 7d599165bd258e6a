"""Cases with context parallelism: attention over a sequence that several ranks share, compared with a whole sequence.

They are CLOSE, as partial results are added in another order. `ring_gathered` is EQUAL: it compares two ways to
exchange keys and values, both with the same order of sums.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.case import Case, Parallelism

FAMILY = "context_parallel"
_RING = "bitproof.builtin_cases.examples.ring_attention"
_ONE, _TWO, _FOUR = (Parallelism(world_size=ranks, ep=1) for ranks in (1, 2, 4))

ring_two = Case(
    name="ring_two",
    family=FAMILY,
    reference=f"{_RING}:whole",
    candidate=f"{_RING}:ring",
    expected="CLOSE",
    steps=3,
    parallelism=_TWO,
    reference_parallelism=_ONE,
)
ring_four = replace(ring_two, name="ring_four", parallelism=_FOUR)
ring_halved = replace(
    ring_two, name="ring_halved", reference=f"{_RING}:ring", parallelism=_FOUR, reference_parallelism=_TWO
)
ring_gathered = replace(
    ring_two,
    name="ring_gathered",
    reference=f"{_RING}:gathered",
    expected="EQUAL",
    parallelism=_FOUR,
    reference_parallelism=None,
)

CASES = (ring_two, ring_four, ring_halved, ring_gathered)
