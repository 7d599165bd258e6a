"""Bucketed collectives: one all-gather and one reduce-scatter a block must give the bits of one a parameter."""

from __future__ import annotations

from dataclasses import replace

from cases import chunking
from harness.case import Pipeline

FAMILY = "bucketing"

CASES = tuple(
    replace(case, name=f"{case.name}_bucketed", family=FAMILY, steps=5, pipeline=Pipeline(bucket=True))
    for case in chunking.CASES
)

transformer_batch_bucketed, moe_batch_bucketed, moe_seq_bucketed, unchunked_bucketed = CASES
