"""Cases with a chunked training step. A graph that is split into chunks must have the bits of the chunked eager model.

- transformer_batch: transformer blocks split along the batch
- moe_batch: MoE blocks split along the batch
- moe_seq: MoE blocks split along the sequence
- `*_sight`: these three, with inputs that expose more defects
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bitproof.harness.case import Batch, Case, Chunking, Model, Parallelism, Precision

FAMILY = "chunking"

# Whole transformer blocks, split along the batch.
transformer_batch = Case(
    name="transformer_batch",
    family=FAMILY,
    reference="eager_chunked",
    candidate="graph",
    chunking=Chunking(dim="batch", modules="layers.*"),
)

# MoE blocks alone, split along the batch: attention stays whole.
moe_batch = replace(transformer_batch, name="moe_batch", chunking=Chunking(dim="batch", modules="layers.*.moe"))

# MoE blocks alone, split along the sequence: halves are not contiguous.
moe_seq = replace(transformer_batch, name="moe_seq", chunking=Chunking(dim="seq", modules="layers.*.moe"))

# Nothing is split: a difference here comes from tracing, not from chunking.
unchunked = replace(transformer_batch, name="unchunked", reference="eager", chunking=None)

PLAIN = (transformer_batch, moe_batch, moe_seq, unchunked)


def variant(base: Case, suffix: str, family: str, **changes: Any) -> Case:
    """Return a case derived from a case of PLAIN, with 5 steps and with `changes`. Raises KeyError for other cases.

    The variant's name begins differently, so that `-k moe_seq` selects only moe_seq. For example, with the suffix
    `world2`, moe_seq becomes experts_seq_world2.
    """
    stem = {
        "transformer_batch": "blocks_batch",
        "moe_batch": "experts_batch",
        "moe_seq": "experts_seq",
        "unchunked": "whole",
    }[base.name]
    return replace(base, name=f"{stem}_{suffix}", family=family, steps=5, **changes)


def with_revealing_inputs(base: Case, parallelism: Parallelism) -> Case:
    """Return a variant whose inputs expose defects that the inputs of `base` hide (see docs/reference/faults.md).

    - Rows have different positions, and documents end inside rows.
    - Each sum over ranks has three terms or more: there are six data ranks, and three of them share the same experts.
    - Of twelve experts, expert 1 gets no token, and some get more than 256.
    - Weights span seven powers of two.
    - The step computes in float32, so no later rounding hides a difference.
    - The output of every module, and its gradient, are compared, too.
    """
    return replace(
        variant(base, "sight", FAMILY),
        steps=2,
        model=Model(layers=2, dense_layers=1, experts=12),
        parallelism=parallelism,
        batch=Batch(sequences=16, seq_len=64, data="adversarial"),
        precision=Precision(compute="float32"),
        observe=("**",),
    )


blocks_batch_sight = with_revealing_inputs(transformer_batch, Parallelism(world_size=6, ep=2))
experts_batch_sight = with_revealing_inputs(moe_batch, Parallelism(world_size=6, ep=3))
experts_seq_sight = with_revealing_inputs(moe_seq, Parallelism(world_size=6, ep=2))

CASES = (*PLAIN, blocks_batch_sight, experts_batch_sight, experts_seq_sight)
