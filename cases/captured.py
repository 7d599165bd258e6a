"""Cases whose step is captured as a CUDA graph: Llama 3 in chunks, and experts of fixed capacity.

No size may depend on data. Without CUDA, the same code runs on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked
from bitproof.harness.case import Memory, Model, Parallelism, Pipeline

FAMILY = "captured"

captured_llama3 = replace(
    transformer_batch,
    name="captured_llama3",
    family=FAMILY,
    steps=5,
    model=Model(family="llama3"),
    pipeline=Pipeline(backend="cuda_graph"),
)

# With every pass whose calls can be captured. Offload cannot be, as it allocates host memory. There are no experts, so
# passes on their all-to-alls have nothing to do.
captured_llama3_nightly = replace(
    captured_llama3,
    name="captured_llama3_nightly",
    steps=2,
    grad_norm=True,
    memory=Memory(policy="selective"),
    parallelism=Parallelism(tp=2),
    pipeline=Pipeline(isolate_gathers=True, bucket=True, backend="cuda_graph"),
)

# The three chunkings with a capacity. Each chunk is a call, which drops rows of its own.
captured_blocks_batch, captured_experts_batch, captured_experts_seq = IN_CHUNKS = tuple(
    replace(
        chunked,
        name=f"captured_{name}",
        family=FAMILY,
        steps=2,
        model=Model(capacity=1.25),
        pipeline=Pipeline(backend="cuda_graph"),
    )
    for name, chunked in (("blocks_batch", transformer_batch), ("experts_batch", moe_batch), ("experts_seq", moe_seq))
)

captured_experts = replace(
    unchunked,
    name="captured_experts",
    family=FAMILY,
    steps=5,
    model=Model(capacity=1.25),
    pipeline=Pipeline(backend="cuda_graph"),
)

captured_experts_tp = replace(
    captured_experts,
    name="captured_experts_tp",
    steps=2,
    parallelism=Parallelism(tp=2, ep=4),
    pipeline=Pipeline(isolate_gathers=True, bucket=True, backend="cuda_graph"),
)

CASES = (captured_llama3, captured_llama3_nightly, *IN_CHUNKS, captured_experts, captured_experts_tp)
