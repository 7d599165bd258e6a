"""Memory policies: whatever is saved, recomputed or kept in host memory meanwhile, the bits must be the same."""

from __future__ import annotations

from dataclasses import replace

from cases import chunking
from harness.case import Memory

FAMILY = "memory"

_CHUNKED = (chunking.transformer_batch, chunking.moe_batch, chunking.moe_seq)
_POLICIES = (Memory(policy="selective"), Memory(policy="full"), Memory(policy="offload"))

# Each policy with each chunking: transformer_batch_selective, moe_seq_offload, ...
_policies_in_chunks = tuple(
    replace(base, name=f"{base.name}_{memory.policy}", family=FAMILY, steps=5, memory=memory)
    for base in _CHUNKED
    for memory in _POLICIES
)

# Recomputation alone, against an eager step that saves everything.
unchunked_full = replace(
    chunking.unchunked, name="unchunked_full", family=FAMILY, steps=5, memory=Memory(policy="full")
)

CASES = (*_policies_in_chunks, unchunked_full)
