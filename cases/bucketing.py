"""Bucketed collectives: one all-gather and one reduce-scatter a block must give the bits of one a parameter.

Gradients that were computed in bfloat16 have 8 bits of mantissa, so the sum of a few in float32 is nearly always exact,
and exact sums are the same in every order. What the order of a bucket's sums is, cases tell whose sums are rounded.
"""

from __future__ import annotations

from bitproof.builtin_cases import chunking
from bitproof.harness.case import Pipeline, Precision

FAMILY = "bucketing"

BUCKETED = tuple(chunking.variant(base, "bucketed", FAMILY, pipeline=Pipeline(bucket=True)) for base in chunking.PLAIN)

ROUNDED = {
    "bucketed_float32": Precision(compute="float32"),
    "bucketed_bf16_reduce": Precision(reduce="bfloat16"),
}

SEE_ORDER = tuple(
    chunking.variant(base, suffix, FAMILY, pipeline=Pipeline(bucket=True), precision=precision)
    for suffix, precision in ROUNDED.items()
    for base in (chunking.transformer_batch, chunking.unchunked)
)
"""The cases that are different when their sums over ranks are taken in another order."""

CASES = (*BUCKETED, *SEE_ORDER)
