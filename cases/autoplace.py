"""Cases that compare autoplace with eager. autoplace chooses each parameter's placement under a limit on a rank's
memory.

Eager uses the same placements, so all bits are equal. FSDP of all parameters would exceed the limit. See
docs/explanation/placement.md.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import unchunked
from bitproof.harness.case import AUTOPLACE, Autoplace, Case, Model, Parallelism, Pipeline, Precision

FAMILY = "autoplace"

_llama3 = replace(
    unchunked,
    family=FAMILY,
    candidate=AUTOPLACE,
    model=Model(family="llama3"),
    parallelism=Parallelism(ep=1, tp=2),
    autoplace=Autoplace(memory_mib=4.2),
    steps=5,
    grad_norm=True,
    requires="scipy",
)
autoplace_llama3_fsdp2_tp2 = replace(
    _llama3, name="autoplace_llama3_fsdp2_tp2", parallelism=Parallelism(world_size=4, ep=1, tp=2)
)
autoplace_llama3_fsdp4_tp2 = replace(_llama3, name="autoplace_llama3_fsdp4_tp2", pipeline=Pipeline(bucket=True))
autoplace_deepseek_fsdp2_tp2_ep2 = replace(
    _llama3,
    name="autoplace_deepseek_fsdp2_tp2_ep2",
    model=Model(),
    parallelism=Parallelism(world_size=4, ep=2, tp=2),
    autoplace=Autoplace(memory_mib=5.3),
)
autoplace_deepseek_fsdp4_tp2_ep4 = replace(
    _llama3,
    name="autoplace_deepseek_fsdp4_tp2_ep4",
    model=Model(),
    parallelism=Parallelism(ep=4, tp=2),
    autoplace=Autoplace(memory_mib=4.5),
)

# The whole graph compiled, in float32: only rounding differs.
autoplace_llama3_inductor = replace(
    autoplace_llama3_fsdp2_tp2,
    name="autoplace_llama3_inductor",
    model=Model(family="llama3", layers=1),
    steps=2,
    expected="CLOSE",
    close_within=1e-3,
    precision=Precision(compute="float32"),
    autoplace=Autoplace(memory_mib=3.0),
    pipeline=Pipeline(backend="inductor"),
)

CASES: tuple[Case, ...] = (
    autoplace_llama3_fsdp2_tp2,
    autoplace_llama3_fsdp4_tp2,
    autoplace_deepseek_fsdp2_tp2_ep2,
    autoplace_deepseek_fsdp4_tp2_ep4,
    autoplace_llama3_inductor,
)
