"""The cases of `tp_ep` in chunks. Each sum over tensor ranks, and each exchange of tokens, runs once per chunk.

The ranks that read the same text divide the tokens of each chunk.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.tp_ep import tp_ep_shared, tp_ep_whole
from bitproof.harness.case import Chunking, Memory, Model, Parallelism, Pipeline

FAMILY = "tp_chunked"

BATCH = Chunking(dim="batch", modules="layers.*")
EXPERTS = "layers.*.moe"

tp_chunked_batch = replace(
    tp_ep_whole, name="tp_chunked_batch", family=FAMILY, steps=20, reference="eager_chunked", chunking=BATCH
)

tp_chunked_moe = replace(tp_chunked_batch, name="tp_chunked_moe", steps=5, chunking=replace(BATCH, modules=EXPERTS))

tp_chunked_seq = replace(tp_chunked_moe, name="tp_chunked_seq", chunking=Chunking(dim="seq", modules=EXPERTS))

# With every optional pass except overlap.
tp_chunked_nightly = replace(
    tp_chunked_batch,
    name="tp_chunked_nightly",
    steps=2,
    memory=Memory(policy="offload"),
    pipeline=Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True),
)

# With overlap too: a chunk's all-to-alls run during the other chunk's compute.
tp_chunked_overlap = replace(
    tp_chunked_nightly, name="tp_chunked_overlap", pipeline=replace(tp_chunked_nightly.pipeline, overlap=True)
)

# Experts are split over a text's ranks.
tp_chunked_shared = replace(
    tp_ep_shared, name="tp_chunked_shared", family=FAMILY, reference="eager_chunked", chunking=BATCH
)

# No experts, four ranks per text.
tp_chunked_llama3 = replace(
    tp_chunked_batch, name="tp_chunked_llama3", steps=2, model=Model(family="llama3"), parallelism=Parallelism(tp=4)
)

# Residuals and norms divided along the sequence: a layer gathers its input and scatters its output, once a chunk.
# Chunks are along the batch only, as the ranks already divide the sequence.
tp_chunked_sp = replace(
    tp_chunked_batch, name="tp_chunked_sp", steps=5, parallelism=replace(tp_chunked_batch.parallelism, sequence=True)
)
tp_chunked_sp_moe = replace(tp_chunked_sp, name="tp_chunked_sp_moe", steps=2, chunking=tp_chunked_moe.chunking)
tp_chunked_sp_llama3 = replace(
    tp_chunked_llama3, name="tp_chunked_sp_llama3", parallelism=replace(tp_chunked_llama3.parallelism, sequence=True)
)

tp_chunked_sp_nightly = replace(tp_chunked_overlap, name="tp_chunked_sp_nightly", parallelism=tp_chunked_sp.parallelism)

# A chunk's gathers, sums and reduce-scatters over tensor ranks run during the other chunk's products; with a divided
# sequence, without experts, and with every pass.
ASYNC = Pipeline(async_tensor=True)
tp_chunked_async = replace(tp_chunked_batch, name="tp_chunked_async", steps=2, pipeline=ASYNC)
tp_chunked_sp_async = replace(tp_chunked_sp, name="tp_chunked_sp_async", steps=2, pipeline=ASYNC)
tp_chunked_sp_llama3_async = replace(tp_chunked_sp_llama3, name="tp_chunked_sp_llama3_async", pipeline=ASYNC)
tp_chunked_sp_async_nightly = replace(
    tp_chunked_sp_nightly,
    name="tp_chunked_sp_async_nightly",
    pipeline=replace(tp_chunked_sp_nightly.pipeline, async_tensor=True, dense_traffic=True),
)

CASES = (
    tp_chunked_batch,
    tp_chunked_moe,
    tp_chunked_seq,
    tp_chunked_nightly,
    tp_chunked_shared,
    tp_chunked_llama3,
    tp_chunked_sp,
    tp_chunked_sp_moe,
    tp_chunked_sp_llama3,
    tp_chunked_overlap,
    tp_chunked_sp_nightly,
    tp_chunked_async,
    tp_chunked_sp_async,
    tp_chunked_sp_llama3_async,
    tp_chunked_sp_async_nightly,
)
