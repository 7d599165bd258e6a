"""Cases with all optional passes at once. A job runs them every night."""

from __future__ import annotations

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, variant
from bitproof.harness.case import Memory, Pipeline

FAMILY = "nightly"

blocks_batch_nightly, experts_batch_nightly, experts_seq_nightly = CASES = tuple(
    variant(
        base,
        "nightly",
        FAMILY,
        memory=Memory(policy="offload"),
        pipeline=Pipeline(isolate_groups=True, bucket=True, overlap=True),
    )
    for base in (transformer_batch, moe_batch, moe_seq)
)
