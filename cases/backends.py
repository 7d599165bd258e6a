"""The graph's backends: what Inductor fuses rounds less often than eager, so CLOSE is what can be had."""

from __future__ import annotations

from dataclasses import replace

from cases.chunking import unchunked
from harness.case import Model, Pipeline

FAMILY = "backends"

inductor = replace(
    unchunked,
    name="inductor",
    family=FAMILY,
    steps=2,
    expected="CLOSE",
    close_within=0.05,
    pipeline=Pipeline(backend="inductor"),
)

# Only FlexAttention's operators are compiled. Inductor compiles their backward on CUDA alone.
regional_inductor = replace(
    inductor,
    name="regional_inductor",
    model=Model(attention="flex"),
    requires="cuda",
    pipeline=Pipeline(backend="regional_inductor"),
)

CASES = (inductor, regional_inductor)
