"""Chunked steps in an order that hides one chunk's all-to-alls behind the other's compute: the same bits."""

from __future__ import annotations

from dataclasses import replace

from cases import chunking
from harness.case import Case, Pipeline

FAMILY = "overlap"


def _overlapped(case: Case) -> Case:
    return replace(case, name=f"{case.name}_overlap", family=FAMILY, steps=5, pipeline=Pipeline(overlap=True))


transformer_batch_overlap = _overlapped(chunking.transformer_batch)
moe_batch_overlap = _overlapped(chunking.moe_batch)
moe_seq_overlap = _overlapped(chunking.moe_seq)

CASES = (transformer_batch_overlap, moe_batch_overlap, moe_seq_overlap)
