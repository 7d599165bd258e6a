"""Cases in which Inductor compiles some parts of the step, the regions, and the rest runs in eager.

- Regions of SDPA: Inductor calls eager's kernels for them, so bits are equal. Graphs have such regions, and so has
  eager, where torch.compile compiles the attention function.
- Regions of FlexAttention: they need CUDA.
- Regions of other modules, such as norms: their cases also run on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import moe_batch, moe_seq, transformer_batch, variant
from bitproof.builtin_cases.joint import joint_llama3_flex_fsdp4_tp2, joint_llama3_fsdp4_tp2
from bitproof.harness.case import Batch, Case, Model, Parallelism, Pipeline, Precision

FAMILY = "regional"
_EAGER = "bitproof.reference.compiled_attention:eager_chunked"

_SMALL = {"parallelism": Parallelism(world_size=2), "model": Model(layers=2, dense_layers=1)}
_BASES = (transformer_batch, moe_batch, moe_seq)


def _regional(base: Case) -> Case:
    """Return a variant whose candidate is a graph with a region for each call of SDPA, and for each of its backward
    calls.
    """
    case = variant(base, "regional", FAMILY, pipeline=Pipeline(backend="regional_inductor"), **_SMALL)
    return replace(case, steps=2)


def _in_eager(base: Case) -> Case:
    case = variant(base, "eager_regional", FAMILY, **_SMALL)
    return replace(case, candidate=_EAGER, steps=2)


# FlexAttention forward and backward, which Inductor compiles on CUDA. It has never run: the bound is a guess.
experts_seq_flex_regional = replace(
    _regional(moe_seq),
    name="experts_seq_flex_regional",
    expected="CLOSE",
    close_within=0.5,
    requires="cuda",
    model=Model(attention="flex", layers=2, dense_layers=1),
    batch=Batch(data="pydoc_lines"),
)

# The same step on a CPU, in float32: norms, and shared experts once per chunk, are the regions. Measured: 7.5e-6.
experts_seq_flex_marked = replace(
    experts_seq_flex_regional,
    name="experts_seq_flex_marked",
    close_within=1e-4,
    requires=None,
    precision=Precision(compute="float32"),
    pipeline=Pipeline(backend="regional_inductor", regions=("layers.*.ffn_norm", "layers.*.moe.shared_experts")),
)

# SDPA regions in a step whose two halves are compiled separately: the system joint.
halves_regional = replace(
    joint_llama3_fsdp4_tp2,
    name="halves_regional",
    family=FAMILY,
    steps=2,
    model=Model(family="llama3", layers=2),
    parallelism=Parallelism(world_size=2, ep=1, tp=2),
    pipeline=Pipeline(bucket=True, backend="regional_inductor"),
)

# In both halves only FlexAttention's operators are compiled, which Inductor does on CUDA. It has never run either.
halves_flex_regional = replace(
    joint_llama3_flex_fsdp4_tp2,
    name="halves_flex_regional",
    family=FAMILY,
    steps=2,
    expected="CLOSE",
    close_within=0.5,
    requires="cuda",
    pipeline=Pipeline(bucket=True, backend="regional_inductor"),
)

CASES = (
    *map(_regional, _BASES),
    *map(_in_eager, _BASES),
    experts_seq_flex_regional,
    experts_seq_flex_marked,
    halves_regional,
    halves_flex_regional,
)
