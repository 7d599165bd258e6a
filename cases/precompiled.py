"""Cases that compare two forms of a step: compiled before any rank starts, and traced at the start of the run.

The compiled step is read from a file, and must equal the traced graph.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked
from bitproof.builtin_cases.tp_ep import tp_ep_whole
from bitproof.harness.case import GRAPH, PRECOMPILED, Case, Model, Parallelism, Pipeline

FAMILY = "precompiled"


def _precompiled(base: Case, name: str) -> Case:
    return replace(base, name=name, family=FAMILY, reference=GRAPH, candidate=PRECOMPILED, steps=5)


precompiled_blocks_batch = _precompiled(transformer_batch, "precompiled_blocks_batch")
precompiled_experts_batch = _precompiled(moe_batch, "precompiled_experts_batch")
precompiled_experts_seq = _precompiled(moe_seq, "precompiled_experts_seq")

# Sharded and split over a tensor group, with a pass that needs further groups.
precompiled_llama3 = replace(
    _precompiled(unchunked, "precompiled_llama3"),
    model=Model(family="llama3"),
    parallelism=Parallelism(ep=1, tp=2),
    pipeline=Pipeline(isolate_gathers=True, bucket=True),
)

# Here a rank's tensor coordinate is data: a buffer of each layer with experts.
precompiled_dp4_tp2_ep4 = _precompiled(tp_ep_whole, "precompiled_dp4_tp2_ep4")

CASES = (
    precompiled_blocks_batch,
    precompiled_experts_batch,
    precompiled_experts_seq,
    precompiled_llama3,
    precompiled_dp4_tp2_ep4,
)
"""Other references are possible: `--reference eager_chunked` or `--reference eager` compares with eager."""
