"""Cases that compare a step on a whole batch with a step on two micro-batches.

The same terms are added in another order, so these cases are CLOSE: the difference has a bound.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.layouts.two_layouts import ddp_fsdp, one_eight

FAMILY = "accumulation"
_LOOP = "bitproof.builtin_cases.examples.mesh_loop"

halves = replace(
    ddp_fsdp, name="halves", family=FAMILY, reference=f"{_LOOP}:ddp", candidate=f"{_LOOP}:halves", expected="CLOSE"
)
halves_one = replace(
    halves,
    name="halves_one",
    parallelism=one_eight.reference_parallelism or one_eight.parallelism,
    reference_parallelism=one_eight.reference_parallelism,
)
# Ranks and micro-batches differ in their number of tokens, and the loss is the mean over all tokens.
uneven_halves = replace(halves, name="uneven_halves", reference=f"{_LOOP}:uneven", candidate=f"{_LOOP}:uneven_halves")
uneven_ranks = replace(
    uneven_halves,
    name="uneven_ranks",
    parallelism=replace(uneven_halves.parallelism, world_size=4),
    reference_parallelism=halves_one.reference_parallelism,
)

CASES = (halves, halves_one, uneven_halves, uneven_ranks)
