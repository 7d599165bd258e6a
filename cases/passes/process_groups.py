"""Cases whose pass gives the all-to-alls of experts their own process group, if other collectives
use the same group.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch
from bitproof.harness.case import Parallelism, Pipeline

FAMILY = "process_groups"

# Experts are split over all ranks. With `shared_groups` the expert group and the parameters' group are the same object,
# so `isolate_groups` gives the all-to-alls their own group.
isolate_shared = replace(
    moe_batch,
    name="isolate_shared",
    family=FAMILY,
    steps=5,
    parallelism=Parallelism(world_size=8, ep=8, shared_groups=True),
    pipeline=Pipeline(isolate_groups=True),
)

# The same ranks, but two objects: nothing changes.
isolate_distinct = replace(isolate_shared, name="isolate_distinct", parallelism=Parallelism(world_size=8, ep=8))

CASES = (isolate_shared, isolate_distinct)
