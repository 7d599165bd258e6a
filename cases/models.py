"""Cases with architectures other than DeepSeek-V3, and with tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, unchunked, variant
from bitproof.harness.case import Model, Parallelism

FAMILY = "models"

_qwen3_moe = tuple(
    variant(base, "qwen3_moe", FAMILY, model=Model(family="qwen3_moe"))
    for base in (transformer_batch, moe_batch, moe_seq)
)

blocks_batch_llama3 = variant(transformer_batch, "llama3", FAMILY, model=Model(family="llama3"))

# Nothing is chunked here; see `tp_chunked`.
_llama3 = replace(unchunked, family=FAMILY, steps=5, model=Model(family="llama3"))
llama3_fsdp4_tp2 = replace(_llama3, name="llama3_fsdp4_tp2", parallelism=Parallelism(ep=1, tp=2))
llama3_fsdp2_tp4 = replace(_llama3, name="llama3_fsdp2_tp4", parallelism=Parallelism(ep=1, tp=4))

CASES = (*_qwen3_moe, blocks_batch_llama3, llama3_fsdp4_tp2, llama3_fsdp2_tp4)
