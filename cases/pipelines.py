"""Cases with pipeline parallelism.

- `pipeline_*`: the graph of a micro-batch in stages, compared with the eager model, whole or in torch's stages.
- `schedules_*`: torch's own schedules, compared with each other or with a model without a pipeline.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import unchunked
from bitproof.harness.case import Batch, Case, Chunking, Memory, Model, Parallelism, Pipeline, Precision, Schedule

FAMILY = "pipelines"

# Two stages of two ranks each; the ranks of a stage share experts and shards.
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

# Eight ranks: four stages, two per rank; and two stages in chunks, each with every optional pass.
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

# Passes on each stage's graph. `pipeline_recomputed` computes whole blocks again, without chunks; the two after it are
# compared with a model without stages. If there are four stages, each has a single layer, and the first has no experts,
# so overlap has no all-to-all to hide there.
pipeline_recomputed = replace(
    pipeline_1f1b,
    name="pipeline_recomputed",
    memory=Memory(policy="full"),
    pipeline=Pipeline(isolate_gathers=True, bucket=True),
)
pipeline_chunked_unstaged = replace(
    pipeline_chunked,
    name="pipeline_chunked_unstaged",
    reference="bitproof.reference.unstaged:eager_chunked",
    parallelism=pipeline_1f1b.parallelism,
)
pipeline_interleaved_chunked = replace(
    pipeline_chunked_unstaged,
    name="pipeline_interleaved_chunked",
    parallelism=pipeline_interleaved.parallelism,
    schedule=pipeline_interleaved.schedule,
    memory=Memory(policy="full"),
)

# Layers are split over tensor ranks within a stage. Llama 3 has four stages, each on two tensor ranks.
pipeline_tp = replace(
    pipeline_1f1b, name="pipeline_tp", steps=2, parallelism=Parallelism(world_size=8, ep=2, tp=2, pp=2)
)
pipeline_llama3 = replace(
    pipeline_tp,
    name="pipeline_llama3",
    model=Model(family="llama3", layers=4),
    parallelism=Parallelism(world_size=8, ep=1, tp=2, pp=4),
)

# The first stage's embeddings and the last stage's projection to logits are tied; and the same without stages.
pipeline_tied = replace(pipeline_1f1b, name="pipeline_tied", schedule=Schedule(tied=True))
pipeline_tied_unstaged = replace(pipeline_tied, name="pipeline_tied_unstaged", reference=pipeline_unstaged.reference)

# Two layers in different stages share their attention's parameters. The graph pipeline traces them once.
pipeline_shared = replace(
    pipeline_1f1b, name="pipeline_shared", schedule=Schedule(shared=("layers.1.attention", "layers.2.attention"))
)
# In bfloat16 a float32 sum of a few gradients is nearly always exact, so only float32 shows the order of its summands.
pipeline_shared_float32 = replace(
    pipeline_shared, name="pipeline_shared_float32", precision=Precision(compute="float32")
)
pipeline_shared_unstaged = replace(
    pipeline_interleaved_chunked,
    name="pipeline_shared_unstaged",
    schedule=Schedule(stages_per_rank=2, shared=("layers.0.attention", "layers.2.attention")),
)

# Parameters are gathered once a step; and each rank's gradients are added over micro-batches, then reduced once.
pipeline_gathers_once = replace(
    pipeline_1f1b,
    name="pipeline_gathers_once",
    memory=Memory(policy="full"),
    pipeline=Pipeline(isolate_gathers=True, bucket=True),
    schedule=Schedule(gathers_once=True),
)
pipeline_reductions_once = replace(
    pipeline_tp, name="pipeline_reductions_once", schedule=Schedule(gathers_once=True, reductions_once=True)
)
pipeline_once_unstaged = replace(
    pipeline_interleaved,
    name="pipeline_once_unstaged",
    reference=pipeline_unstaged.reference,
    pipeline=Pipeline(isolate_gathers=True, bucket=True),
    schedule=Schedule(
        stages_per_rank=2, gathers_once=True, reductions_once=True, shared=("layers.0.attention", "layers.2.attention")
    ),
)

# Each backward is divided: first the gradient of the stage's input, later those of weights.
pipeline_zero_bubble = replace(
    pipeline_llama3, name="pipeline_zero_bubble", schedule=Schedule(micro_batches=8, order="zero_bubble")
)
pipeline_zero_bubble_chunked = replace(
    pipeline_chunked, name="pipeline_zero_bubble_chunked", steps=2, schedule=Schedule(order="zero_bubble")
)
pipeline_zero_bubble_once = replace(
    pipeline_interleaved,
    name="pipeline_zero_bubble_once",
    steps=2,
    reference=pipeline_unstaged.reference,
    schedule=Schedule(order="zero_bubble", stages_per_rank=2, gathers_once=True, reductions_once=True),
)

# Two stages per rank in a V, so rank 0 has the first and the last stage. Both orders divide backwards.
pipeline_zbv = replace(
    pipeline_interleaved, name="pipeline_zbv", steps=2, schedule=Schedule(order="zbv", stages_per_rank=2)
)
pipeline_zbv_once = replace(
    pipeline_zbv,
    name="pipeline_zbv_once",
    reference=pipeline_unstaged.reference,
    schedule=Schedule(order="zbv", stages_per_rank=2, tied=True, gathers_once=True, reductions_once=True),
)
pipeline_dual_pipe_v = replace(
    pipeline_llama3,
    name="pipeline_dual_pipe_v",
    model=Model(family="llama3", layers=8),
    schedule=Schedule(micro_batches=8, order="dual_pipe_v", stages_per_rank=2),
)
pipeline_dual_pipe_v_chunked = replace(
    pipeline_interleaved_chunked,
    name="pipeline_dual_pipe_v_chunked",
    steps=2,
    schedule=Schedule(order="dual_pipe_v", stages_per_rank=2),
)

# torch's schedules add a layer's gradients over micro-batches in the same order, on any rank.
_TORCH = "bitproof.builtin_cases.examples.pipelined"
schedules_gpipe = Case(
    name="schedules_gpipe",
    family=FAMILY,
    reference=f"{_TORCH}:gpipe",
    candidate=f"{_TORCH}:one_f_one_b",
    steps=3,
    parallelism=Parallelism(world_size=4, ep=1),
    preload=("torch.distributed.pipelining",),
)
schedules_interleaved = replace(
    schedules_gpipe,
    name="schedules_interleaved",
    reference=f"{_TORCH}:one_f_one_b",
    candidate=f"{_TORCH}:interleaved",
)
schedules_zero_bubble = replace(
    schedules_gpipe,
    name="schedules_zero_bubble",
    reference=f"{_TORCH}:interleaved",
    candidate=f"{_TORCH}:zero_bubble",
    parallelism=Parallelism(world_size=8, ep=1),
)
schedules_unstaged = replace(
    schedules_gpipe,
    name="schedules_unstaged",
    reference=f"{_TORCH}:unstaged",
    candidate=f"{_TORCH}:zero_bubble",
    reference_parallelism=Parallelism(world_size=1, ep=1),
)
# The whole batch against its micro-batches: the same terms in another order.
schedules_whole = replace(
    schedules_unstaged,
    name="schedules_whole",
    reference=f"{_TORCH}:whole",
    candidate=f"{_TORCH}:one_f_one_b",
    parallelism=Parallelism(world_size=2, ep=1),
    expected="CLOSE",
)

_OURS = (
    pipeline_gpipe,
    pipeline_1f1b,
    pipeline_unstaged,
    pipeline_interleaved,
    pipeline_chunked,
    pipeline_recomputed,
    pipeline_chunked_unstaged,
    pipeline_interleaved_chunked,
    pipeline_tp,
    pipeline_llama3,
    pipeline_tied,
    pipeline_tied_unstaged,
    pipeline_shared,
    pipeline_shared_float32,
    pipeline_shared_unstaged,
    pipeline_gathers_once,
    pipeline_reductions_once,
    pipeline_once_unstaged,
    pipeline_zero_bubble,
    pipeline_zero_bubble_chunked,
    pipeline_zero_bubble_once,
    pipeline_zbv,
    pipeline_zbv_once,
    pipeline_dual_pipe_v,
    pipeline_dual_pipe_v_chunked,
)
_TORCHS = (schedules_gpipe, schedules_interleaved, schedules_zero_bubble, schedules_unstaged, schedules_whole)
CASES = (*_OURS, *_TORCHS)
