"""The three chunkings of `chunking` with folded models: the tokens of all sequences are in a single dim.

Both kinds of chunking split this dim: "batch" between two sequences, and "seq" within a sequence.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked, variant
from bitproof.harness.case import Batch, Case, Model, Parallelism, Pipeline

FAMILY = "folded"


def _folded(base: Case, suffix: str = "folded", sequences: int = 4) -> Case:
    """Return a variant with the tokens of all sequences in a single dim. Each line of text is a document.

    Lines are short: for example, 4 sequences of 32 tokens have 8 documents or more.
    """
    batch = Batch(sequences=sequences, data="pydoc_lines")
    return variant(base, suffix, FAMILY, model=Model(attention="flex", folded=True), batch=batch)


blocks_batch_folded = _folded(transformer_batch)
experts_batch_folded = _folded(moe_batch)

# Three sequences of 32 tokens: chunk 1 begins with token 48, inside the second sequence.
experts_seq_folded = _folded(moe_seq, sequences=3)

whole_folded = _folded(unchunked)

# Four texts, each on two ranks, which also divide the tokens of each chunk.
folded_tp = replace(blocks_batch_folded, name="folded_tp", steps=2, parallelism=Parallelism(tp=2, ep=4))

# With the optional passes that join and hide collectives.
folded_overlap = replace(
    blocks_batch_folded, name="folded_overlap", steps=2, pipeline=Pipeline(bucket=True, overlap=True)
)

CASES = (
    blocks_batch_folded,
    experts_batch_folded,
    experts_seq_folded,
    whole_folded,
    folded_tp,
    folded_overlap,
)
