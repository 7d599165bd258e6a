"""Cases whose pass moves gathers and reduce-scatters of parameters away from the all-to-alls of experts."""

from __future__ import annotations

from bitproof.builtin_cases.chunking import moe_seq, transformer_batch, unchunked, variant
from bitproof.harness.case import Memory, Pipeline

FAMILY = "traffic"

_ALL = Pipeline(isolate_gathers=True, bucket=True, overlap=True, dense_traffic=True)

# Each bucket by itself, between all-to-alls that wait for each other.
whole_dense_traffic = variant(unchunked, "dense_traffic", FAMILY, pipeline=Pipeline(bucket=True, dense_traffic=True))

# The order of overlap, in which a gather may run beside the other chunk's all-to-all.
experts_seq_dense_traffic = variant(moe_seq, "dense_traffic", FAMILY, pipeline=_ALL)

# Backward gathers its parameters again.
blocks_batch_dense_traffic = variant(
    transformer_batch, "dense_traffic", FAMILY, pipeline=_ALL, memory=Memory(policy="full")
)

CASES = (whole_dense_traffic, experts_seq_dense_traffic, blocks_batch_dense_traffic)
