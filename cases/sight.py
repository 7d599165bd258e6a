"""Cases that are made to see: their inputs show what those of the main cases hide.

Rows have positions of their own and hold ends of documents; six data ranks are no power of two, and share an expert by
threes, so that every sum has three summands or more; experts get from one to hundreds of tokens; weights spread over
seven powers of two; and a step computes in float32, where no later rounding swallows a difference. `docs/faults.md` has
the defects that are seen here alone.
"""

from __future__ import annotations

from dataclasses import replace

from cases.chunking import moe_seq, transformer_batch, variant
from harness.case import Batch, Model, Parallelism, Precision

FAMILY = "sight"

CASES = tuple(
    replace(
        variant(base, "sight", FAMILY),
        steps=2,
        model=Model(layers=2, dense_layers=1),
        parallelism=Parallelism(world_size=6),
        batch=Batch(sequences=16, seq_len=64, data="adversarial"),
        precision=Precision(compute="float32"),
    )
    for base in (transformer_batch, moe_seq)
)
