"""Cases whose graph Inductor compiles. It fuses operators and adds in another order than eager, so CLOSE is expected.

The bounds are above the largest errors that were measured with 8 ranks on a CPU. `regional_inductor` runs only on CUDA.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, unchunked
from bitproof.harness.case import Batch, Model, Pipeline, Precision

FAMILY = "backends"

# The whole graph compiled, in float32: only rounding differs. Measured: 8.5e-7.
inductor_dense = replace(
    unchunked,
    name="inductor_dense",
    family=FAMILY,
    steps=2,
    expected="CLOSE",
    close_within=1e-5,
    model=Model(flavor="dense"),
    precision=Precision(compute="float32"),
    pipeline=Pipeline(backend="inductor"),
)

# The whole graph of a model with experts, chunked, in bfloat16. A score that rounds differently can send a token to
# another expert, so the gradients of routers and experts change by far more than rounding. Measured over one step:
# 0.14 on an EPYC with AVX-512 for bfloat16. A second step starts from parameters that already differ, so its error
# means little: 0.26 on a Xeon with AMX (0.55 without Inductor's emulation of eager's casts), 0.67 on that EPYC.
inductor_moe = replace(
    moe_batch,
    name="inductor_moe",
    family=FAMILY,
    steps=1,
    expected="CLOSE",
    close_within=0.5,
    pipeline=Pipeline(backend="inductor"),
)

# Only FlexAttention's operators are compiled. Inductor compiles their backward on CUDA alone. Measured over two steps
# with torch 2.11.0 on an H100, which 8 ranks shared: 0.48. One step is compared, as a second one starts from
# parameters that already differ.
regional_inductor = replace(
    inductor_dense,
    name="regional_inductor",
    steps=1,
    model=Model(attention="flex"),
    batch=Batch(data="pydoc_lines"),
    precision=Precision(),
    close_within=0.5,
    requires="cuda",
    pipeline=Pipeline(backend="regional_inductor"),
)

CASES = (inductor_dense, inductor_moe, regional_inductor)
