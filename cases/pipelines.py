"""Pipelines: the graph of a micro-batch cut into stages, against eager stages that torch.distributed.pipelining runs,
and against no stages.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import unchunked
from bitproof.harness.case import Batch, Chunking, Memory, Model, Parallelism, Pipeline, Schedule

FAMILY = "pipelines"

# Two stages of two ranks each, which share experts, and shards within each stage.
pipeline_gpipe = replace(
    unchunked,
    name="pipeline_gpipe",
    family=FAMILY,
    steps=5,
    model=Model(layers=4),
    parallelism=Parallelism(world_size=4, ep=2, pp=2),
    batch=Batch(sequences=8),
    schedule=Schedule(order="gpipe"),
)

pipeline_1f1b = replace(pipeline_gpipe, name="pipeline_1f1b", schedule=Schedule())

# Against no stages at all: each stage's ranks train the whole model in the same micro-batches.
pipeline_unstaged = replace(pipeline_1f1b, name="pipeline_unstaged", reference="bitproof.reference.unstaged:eager")

# Eight ranks: four stages, two a rank; and with every optional pass in each of two stages, in chunks.
pipeline_interleaved = replace(
    pipeline_1f1b,
    name="pipeline_interleaved",
    parallelism=Parallelism(world_size=8, ep=2, pp=2),
    schedule=Schedule(stages_per_rank=2),
)
pipeline_chunked = replace(
    pipeline_1f1b,
    name="pipeline_chunked",
    reference="eager_chunked",
    chunking=Chunking(dim="batch", modules="layers.*"),
    parallelism=Parallelism(world_size=8, ep=2, pp=2),
    memory=Memory(policy="offload"),
    pipeline=Pipeline(isolate_groups=True, isolate_gathers=True, bucket=True, overlap=True),
)

CASES = (pipeline_gpipe, pipeline_1f1b, pipeline_unstaged, pipeline_interleaved, pipeline_chunked)
