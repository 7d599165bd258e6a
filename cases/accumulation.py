"""One batch against two halves: the same terms, added in another order, so close within what that explains."""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.two_layouts import ddp_fsdp, one_eight

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

CASES = (halves, halves_one)
