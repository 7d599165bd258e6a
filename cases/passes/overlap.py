"""Cases whose pass reorders a chunked step: the all-to-alls of a chunk run during the other chunk's compute."""

from __future__ import annotations

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, variant
from bitproof.harness.case import Pipeline

FAMILY = "overlap"

CASES = tuple(
    variant(base, "overlap", FAMILY, pipeline=Pipeline(overlap=True))
    for base in (transformer_batch, moe_batch, moe_seq)
)
