"""Tensor and expert parallelism together: DeepSeek-V3 with layers split over two ranks, and experts over two or four.

Ranks that read the same text divide its tokens among them, and send them to the ranks of their experts.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import unchunked
from bitproof.harness.case import Memory, Model, Parallelism, Pipeline

FAMILY = "tp_ep"

# Four texts, each on two ranks; four ranks, of two texts, share a set of experts.
tp_ep_whole = replace(
    unchunked, name="tp_ep_whole", family=FAMILY, steps=5, parallelism=Parallelism(tp=2, ep=4), grad_norm=True
)

# The same with every pass that works without chunks.
tp_ep_nightly = replace(
    tp_ep_whole,
    name="tp_ep_nightly",
    steps=2,
    memory=Memory(policy="offload"),
    pipeline=Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True),
)

# Experts are split over a text's ranks. With `shared_groups` the expert group and the tensor group are the same object,
# so `isolate_groups` gives the all-to-alls their own group.
tp_ep_shared = replace(
    tp_ep_whole,
    name="tp_ep_shared",
    steps=2,
    model=Model(layers=2),
    parallelism=Parallelism(tp=2, ep=2, shared_groups=True),
    pipeline=Pipeline(isolate_groups=True),
)

# The same ranks, but two objects: nothing changes.
tp_ep_distinct = replace(tp_ep_shared, name="tp_ep_distinct", parallelism=Parallelism(tp=2, ep=2))

CASES = (tp_ep_whole, tp_ep_nightly, tp_ep_shared, tp_ep_distinct)
