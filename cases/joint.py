"""Cases that compare torch's joint graph with eager. torch's partitioner divides this graph into forward and backward.

FSDP is combined with tensor parallelism (Llama 3) and with expert parallelism (DeepSeek-V3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked
from bitproof.harness.case import JOINT, Batch, Case, Memory, Model, Parallelism, Pipeline, Precision

FAMILY = "joint"

_llama3 = replace(
    unchunked,
    family=FAMILY,
    candidate=JOINT,
    model=Model(family="llama3"),
    pipeline=Pipeline(bucket=True),
)
joint_llama3_fsdp2_tp4 = replace(_llama3, name="joint_llama3_fsdp2_tp4", parallelism=Parallelism(ep=1, tp=4))
joint_llama3_fsdp4_tp2 = replace(_llama3, name="joint_llama3_fsdp4_tp2", parallelism=Parallelism(ep=1, tp=2))

# In addition to the cut's recomputation, backward recomputes whole blocks, including their parameters' gathers.
joint_llama3_recomputed = replace(joint_llama3_fsdp4_tp2, name="joint_llama3_recomputed", memory=Memory(policy="full"))


def _flex(case: Case) -> Case:
    name = case.name.replace("llama3", "llama3_flex")
    model = Model(family="llama3", attention="flex")
    return replace(case, name=name, model=model, batch=Batch(data="pydoc_lines"))


joint_llama3_flex_fsdp2_tp4, joint_llama3_flex_fsdp4_tp2 = map(_flex, (joint_llama3_fsdp2_tp4, joint_llama3_fsdp4_tp2))

_deepseek = replace(_llama3, model=Model())
joint_deepseek_ep2 = replace(_deepseek, name="joint_deepseek_ep2", parallelism=Parallelism(ep=2))
joint_deepseek_ep4 = replace(_deepseek, name="joint_deepseek_ep4", parallelism=Parallelism(ep=4))

# Both graphs compiled, each as a whole, in float32: only rounding differs. Measured: 1.1e-5 on 8 ranks, 1.9e-5 with one
# layer on 2 ranks: a parameter after AdamW's first step, which takes the sign of a gradient.
joint_llama3_inductor = replace(
    joint_llama3_fsdp4_tp2,
    name="joint_llama3_inductor",
    steps=2,
    expected="CLOSE",
    close_within=1e-3,
    precision=Precision(compute="float32"),
    pipeline=Pipeline(bucket=True, backend="inductor"),
)

# The three chunkings of `chunking`, with the passes that need chunks. Experts are on two ranks.
_in_two = replace(transformer_batch, family=FAMILY, candidate=JOINT, steps=5, parallelism=Parallelism(ep=2))
_all_passes = Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True, overlap=True, dense_traffic=True)


def _joint_chunks(base: Case, name: str, **changes: Any) -> Case:
    return replace(_in_two, name=name, chunking=base.chunking, **changes)


joint_blocks_batch_offload = _joint_chunks(
    transformer_batch, "joint_blocks_batch_offload", memory=Memory(policy="offload"), pipeline=_all_passes
)
joint_experts_batch = _joint_chunks(moe_batch, "joint_experts_batch")
joint_experts_seq_overlap = _joint_chunks(
    moe_seq, "joint_experts_seq_overlap", memory=Memory(policy="full"), pipeline=_all_passes
)

# A tensor group's collectives of one chunk are in flight during the other chunk's compute.
joint_tp_async = replace(
    joint_llama3_fsdp4_tp2,
    name="joint_tp_async",
    reference="eager_chunked",
    steps=5,
    chunking=transformer_batch.chunking,
    pipeline=Pipeline(isolate_gathers=True, bucket=True, async_tensor=True),
)

# Folded tokens, experts with a capacity, and the loss in pieces.
joint_folded = _joint_chunks(
    moe_seq,
    "joint_folded",
    steps=2,
    model=Model(attention="flex", folded=True, capacity=2.0, loss_pieces=16),
    batch=Batch(data="pydoc_lines"),
)

# Without chunks: activations in host memory, divided by the cut alone.
joint_llama3_offloaded = replace(
    joint_llama3_fsdp4_tp2, name="joint_llama3_offloaded", steps=5, memory=Memory(policy="offload")
)

CASES = (
    joint_llama3_fsdp2_tp4,
    joint_llama3_fsdp4_tp2,
    joint_llama3_recomputed,
    joint_llama3_flex_fsdp2_tp4,
    joint_llama3_flex_fsdp4_tp2,
    joint_deepseek_ep2,
    joint_deepseek_ep4,
    joint_llama3_inductor,
    joint_blocks_batch_offload,
    joint_experts_batch,
    joint_experts_seq_overlap,
    joint_tp_async,
    joint_folded,
    joint_llama3_offloaded,
)
