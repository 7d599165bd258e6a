"""Cases with memory policies: saving, recomputation and offload must not change any bit."""

from __future__ import annotations

from bitproof.builtin_cases import chunking
from bitproof.harness.case import Memory, Pipeline

FAMILY = "memory"

_CHUNKED = (chunking.transformer_batch, chunking.moe_batch, chunking.moe_seq)
_POLICIES = (Memory(policy="selective"), Memory(policy="full"), Memory(policy="offload"))

# Each policy with each chunking: blocks_batch_selective, experts_seq_offload, ...
_policies_in_chunks = tuple(
    chunking.variant(base, memory.policy, FAMILY, memory=memory) for base in _CHUNKED for memory in _POLICIES
)

# Recomputation alone, against an eager step that saves everything.
whole_full = chunking.variant(chunking.unchunked, "full", FAMILY, memory=Memory(policy="full"))

# Activations saved by operator, as torchtitan does: every second matrix product, attention, and the rows that arrived
# from other ranks. All others are recomputed, with the gathers of parameters.
LISTED = ("mm/2", "attention", "all_to_all_single")
_listed_in_chunks = tuple(
    chunking.variant(base, "listed", FAMILY, memory=Memory(policy="selective", save=LISTED))
    for base in (chunking.transformer_batch, chunking.moe_seq)
)

# What the list saves is in host memory, and every pass takes part.
blocks_batch_listed_offload = chunking.variant(
    chunking.transformer_batch,
    "listed_offload",
    FAMILY,
    memory=Memory(policy="offload", save=LISTED),
    pipeline=Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True, overlap=True),
)

# How long copies may take: to host memory until the next block begins, or for two whole blocks; back from the start of
# the block that needs them, or of the one two blocks before. The model has three blocks.
blocks_batch_offload_early = chunking.variant(
    chunking.transformer_batch, "offload_early", FAMILY, memory=Memory(policy="offload", prefetch=2, defer=0)
)
experts_seq_offload_late = chunking.variant(
    chunking.moe_seq, "offload_late", FAMILY, memory=Memory(policy="offload", prefetch=0, defer=2)
)

CASES = (
    *_policies_in_chunks,
    whole_full,
    *_listed_in_chunks,
    blocks_batch_listed_offload,
    blocks_batch_offload_early,
    experts_seq_offload_late,
)
