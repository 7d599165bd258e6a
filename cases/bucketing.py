"""Bucketed collectives: one all-gather and one reduce-scatter a block must give the bits of one a parameter."""

from __future__ import annotations

from cases import chunking
from harness.case import Pipeline

FAMILY = "bucketing"

CASES = tuple(chunking.variant(base, "bucketed", FAMILY, pipeline=Pipeline(bucket=True)) for base in chunking.CASES)
