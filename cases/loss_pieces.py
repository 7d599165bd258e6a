"""The three chunkings of `chunking` with the loss in pieces, for 16 or 32 tokens at a time.

Each piece goes through projection, cross entropy and their gradients before the next piece begins.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked, variant
from bitproof.builtin_cases.folded import blocks_batch_folded
from bitproof.harness.case import PRECOMPILED, Case, Memory, Model, Parallelism, Pipeline

FAMILY = "loss_pieces"


def _in_pieces(base: Case, pieces: int) -> Case:
    return variant(base, "pieces", FAMILY, model=Model(loss_pieces=pieces))


# 128 tokens in pieces of 32, a sequence each.
blocks_batch_pieces = _in_pieces(transformer_batch, 4)
experts_batch_pieces = _in_pieces(moe_batch, 4)
# Pieces of 16 tokens: half a sequence.
experts_seq_pieces = _in_pieces(moe_seq, 8)
whole_pieces = _in_pieces(unchunked, 4)

# Folded tokens: pieces end where they like.
pieces_folded = replace(
    blocks_batch_folded,
    name="pieces_folded",
    family=FAMILY,
    steps=2,
    model=replace(blocks_batch_folded.model, loss_pieces=16),
)

# With every optional pass.
pieces_nightly = replace(
    blocks_batch_pieces,
    name="pieces_nightly",
    steps=2,
    memory=Memory(policy="offload"),
    pipeline=Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True, overlap=True),
)

# Ranks divide the sequence between layers, and gather it for the loss.
pieces_sp = replace(blocks_batch_pieces, name="pieces_sp", steps=2, parallelism=Parallelism(tp=2, ep=4, sequence=True))

# Traced and rewritten by one process before any rank starts.
pieces_precompiled = replace(blocks_batch_pieces, name="pieces_precompiled", candidate=PRECOMPILED, steps=2)

CASES = (
    blocks_batch_pieces,
    experts_batch_pieces,
    experts_seq_pieces,
    whole_pieces,
    pieces_folded,
    pieces_nightly,
    pieces_sp,
    pieces_precompiled,
)
