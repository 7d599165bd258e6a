"""FlexAttention with a document mask: one higher-order operator with nested graphs per layer."""

from __future__ import annotations

from bitproof.builtin_cases.chunking import moe_seq, transformer_batch, unchunked, variant
from bitproof.harness.case import Batch, Case, Model

FAMILY = "attention"


def _flex(case: Case) -> Case:
    """One document per line of text: a row of 32 tokens holds ends, starts and middles of documents."""
    batch = Batch(data="pydoc_lines")
    return variant(case, "flex", FAMILY, model=Model(attention="flex"), batch=batch)


# Attention runs once per chunk, with its mask cut in two; or whole, with a symbolic sequence; or nothing is split.
CASES = tuple(map(_flex, (transformer_batch, moe_seq, unchunked)))
