"""Edge cases of the three chunkings of `chunking`.

They have few ranks, few or many rows, padded shards, experts without tokens, or other dtypes.
"""

from __future__ import annotations

from typing import Any

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, variant
from bitproof.harness.case import Batch, Model, Parallelism, Precision

FAMILY = "shapes"

VARIANTS: dict[str, dict[str, Any]] = {
    "world2": {"parallelism": Parallelism(world_size=2)},
    "world4": {"parallelism": Parallelism(world_size=4)},
    # 8 ranks divide neither the dense nor the expert parameters' rows: the last ranks hold padding, some nothing else.
    "uneven": {"model": Model(flavor="uneven")},
    # Each of a rank's 16 tokens goes to 3 experts: two ranks share 128 experts and have 96 rows for them.
    "idle_experts": {"model": Model(flavor="many_experts"), "batch": Batch(sequences=2, seq_len=8)},
    "batch2": {"batch": Batch(sequences=2)},
    "batch8": {"batch": Batch(sequences=8)},
    "float32": {"precision": Precision(compute="float32")},
    "bf16_reduce": {"precision": Precision(reduce="bfloat16")},
}
"""Suffix of a case's name -> the changes of its variants. For example, `world2` makes blocks_batch_world2."""

CASES = tuple(
    variant(base, suffix, FAMILY, **changes)
    for suffix, changes in VARIANTS.items()
    for base in (transformer_batch, moe_batch, moe_seq)
)
