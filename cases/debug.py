"""The three chunkings of `chunking` with DeepSeek-V3's debug model: 6 layers, 33 million parameters, realistic heads.

A step is ten times as slow as with the flavor `tiny`, so each case has only two steps.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, variant
from bitproof.harness.case import Model, Parallelism

FAMILY = "debug"

CASES = tuple(
    replace(
        variant(base, "debug", FAMILY),
        steps=2,
        model=Model(flavor="debugmodel"),
        parallelism=Parallelism(world_size=4),
        grad_norm=True,
    )
    for base in (transformer_batch, moe_batch, moe_seq)
)
