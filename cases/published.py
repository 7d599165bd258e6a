"""Cases with DeepSeek-V2-Lite in its published size: 16 billion parameters, 29 GiB of state per rank.

They have chunks, or placements that autoplace chooses. `make published` runs all parts that need no values, on smaller
machines.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases import autoplace, nightly
from bitproof.harness.case import Autoplace, Batch, Model, Parallelism

FAMILY = "published"

_TEXTS = Batch(sequences=4, seq_len=4096)

experts_seq_16b = replace(
    nightly.experts_seq_nightly,
    name="experts_seq_16b",
    family=FAMILY,
    steps=10,
    model=Model(flavor="16B"),
    batch=_TEXTS,
    requires="cuda",
)

whole_16b_placed = replace(
    autoplace.autoplace_deepseek_fsdp4_tp2_ep4,
    name="whole_16b_placed",
    family=FAMILY,
    steps=10,
    model=Model(flavor="16B"),
    batch=Batch(sequences=1, seq_len=2048),
    autoplace=Autoplace(memory_mib=78_000),
    requires="cuda",
)

# As `experts_seq_16b`, with the debug model, which fits two machines of two cores.
experts_seq_nightly_debug = replace(
    nightly.experts_seq_nightly,
    name="experts_seq_nightly_debug",
    family=FAMILY,
    steps=10,
    model=Model(flavor="debugmodel"),
    parallelism=Parallelism(world_size=4),
)

CASES = (experts_seq_16b, whole_16b_placed, experts_seq_nightly_debug)
