"""Cases with memory policies: saving, recomputation and offload must not change any bit."""

from __future__ import annotations

from bitproof.builtin_cases import chunking
from bitproof.harness.case import Memory

FAMILY = "memory"

_CHUNKED = (chunking.transformer_batch, chunking.moe_batch, chunking.moe_seq)
_POLICIES = (Memory(policy="selective"), Memory(policy="full"), Memory(policy="offload"))

# Each policy with each chunking: blocks_batch_selective, experts_seq_offload, ...
_policies_in_chunks = tuple(
    chunking.variant(base, memory.policy, FAMILY, memory=memory) for base in _CHUNKED for memory in _POLICIES
)

# Recomputation alone, against an eager step that saves everything.
whole_full = chunking.variant(chunking.unchunked, "full", FAMILY, memory=Memory(policy="full"))

CASES = (*_policies_in_chunks, whole_full)
