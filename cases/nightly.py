"""Every optional pass together: the pipeline that a nightly job runs."""

from __future__ import annotations

from dataclasses import replace

from cases.chunking import moe_batch, moe_seq, transformer_batch
from harness.case import Memory, Pipeline

FAMILY = "nightly"

CASES = tuple(
    replace(
        base,
        name=f"{base.name}_nightly",
        family=FAMILY,
        steps=5,
        memory=Memory(policy="offload"),
        pipeline=Pipeline(isolate_groups=True, bucket=True, overlap=False),
    )
    for base in (transformer_batch, moe_batch, moe_seq)
)
