"""Cases whose systems are training loops with their own models: fsdp2_loop and compiled in cases/examples, on 2 ranks.

These systems ignore the case's `model`. Your own package declares such cases by an entry point of the group
`bitproof.cases`.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.case import Batch, Case, Parallelism

FAMILY = "trainers"
_LOOP, _COMPILED = "bitproof.builtin_cases.examples.fsdp2_loop", "bitproof.builtin_cases.examples.compiled"

loop_checkpointed = Case(
    name="loop_checkpointed",
    family=FAMILY,
    reference=f"{_LOOP}:plain",
    candidate=f"{_LOOP}:checkpointed",
    steps=3,
    parallelism=Parallelism(world_size=2, ep=1),
    batch=Batch(sequences=4, seq_len=16),
)
loop_kept_gathered = replace(loop_checkpointed, name="loop_kept_gathered", candidate=f"{_LOOP}:kept_gathered")
loop_bf16_reduce = replace(
    loop_checkpointed,
    name="loop_bf16_reduce",
    candidate=f"{_LOOP}:bf16_reduce",
    expected="DIFFERENT",
    differs=("grad", "param", "optimizer"),
    differs_within=0.02,  # measured: 0.007, a norm's optimizer state
)
compiled_aot_eager = replace(
    loop_checkpointed,
    name="compiled_aot_eager",
    reference=f"{_COMPILED}:eager",
    candidate=f"{_COMPILED}:aot_eager",
)
compiled_inductor = replace(
    compiled_aot_eager,
    name="compiled_inductor",
    candidate=f"{_COMPILED}:inductor",
    expected="CLOSE",
    close_within=1e-5,
)

CASES = (loop_checkpointed, loop_kept_gathered, loop_bf16_reduce, compiled_aot_eager, compiled_inductor)
