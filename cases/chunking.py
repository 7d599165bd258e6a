"""Chunked training steps: the graph pass must do what the eager wrapper does by hand, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.case import Case, Chunking

FAMILY = "chunking"

# Whole transformer blocks, split along the batch.
transformer_batch = Case(
    name="transformer_batch",
    family=FAMILY,
    reference="eager_chunked",
    candidate="graph",
    chunking=Chunking(dim="batch", modules="layers.*"),
)

# MoE blocks alone, split along the batch: attention stays whole.
moe_batch = replace(transformer_batch, name="moe_batch", chunking=Chunking(dim="batch", modules="layers.*.moe"))

# MoE blocks alone, split along the sequence: halves are not contiguous.
moe_seq = replace(transformer_batch, name="moe_seq", chunking=Chunking(dim="seq", modules="layers.*.moe"))

# Nothing is split: what differs here differs by tracing, not by chunking.
unchunked = replace(transformer_batch, name="unchunked", reference="eager", chunking=None)

CASES = (transformer_batch, moe_batch, moe_seq, unchunked)


def variant(base: Case, suffix: str, family: str, **changes: Any) -> Case:
    """One of these cases with something else about it, for 5 steps: blocks_batch_world2 of transformer_batch.

    The name has a stem of its own, so that `-k moe_seq` goes on meaning one case.
    """
    stem = {
        "transformer_batch": "blocks_batch",
        "moe_batch": "experts_batch",
        "moe_seq": "experts_seq",
        "unchunked": "whole",
    }[base.name]
    return replace(base, name=f"{stem}_{suffix}", family=family, steps=5, **changes)
