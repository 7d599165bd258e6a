"""Cases with bucketed collectives: a single all-gather and reduce-scatter per block, instead of one per parameter.

The bits must be equal. A wrong order of sums shows only if the sums are rounded, and in most cases they are not. A
bfloat16 number has 8 bits of mantissa, so a float32 sum of a few is nearly always exact. For example, 1 + 2**-7 +
2**-10 needs 11 of 24 bits.
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
"""The cases that become DIFFERENT if ranks are summed in another order."""

CASES = (*BUCKETED, *SEE_ORDER)
