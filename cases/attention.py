"""FlexAttention under a mask that keeps documents apart: one higher-order operator a layer, nested graphs and all."""

from __future__ import annotations

from bitproof.builtin_cases.chunking import moe_seq, transformer_batch, unchunked, variant
from bitproof.harness.case import Batch, Case, Model

FAMILY = "attention"


def _flex(case: Case) -> Case:
    """A line a document: a row of 32 tokens holds ends, starts and middles of documents."""
    batch = Batch(data="pydoc_lines")
    return variant(case, "flex", FAMILY, model=Model(attention="flex"), batch=batch)


# Attention itself runs once a chunk, its mask cut in two; or whole, with the sequence left open; or nothing is split.
CASES = tuple(map(_flex, (transformer_batch, moe_seq, unchunked)))
