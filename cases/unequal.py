"""Cases whose two systems must differ: one of them rounds in another order, which bitproof must detect and locate."""

from __future__ import annotations

from dataclasses import replace

from bitproof.builtin_cases.chunking import transformer_batch
from bitproof.harness.case import Chunking

FAMILY = "unequal"

# Two steps are enough: the first differs, and later steps inherit the difference. The largest error by rounding,
# measured on 8 ranks with torch 2.13.0 on a CPU: 0.006, a router's weight and a norm's optimizer state.
_base = replace(
    transformer_batch,
    family=FAMILY,
    steps=2,
    expected="DIFFERENT",
    differs=("grad", "param", "optimizer"),
    differs_within=0.02,
)

# The candidate adds both chunks' gradients before the cast and the reduction, the eager reference after them.
early_accumulation = replace(
    _base,
    name="early_accumulation",
    chunking=Chunking(dim="batch", modules="layers.*", early_grad_accumulation=True),
)

# A chunked gradient is a sum of two partial sums, an unchunked gradient is a single sum. A loss is neither: each row is
# computed as if it were alone. On CUDA a library may choose another kernel for half as many rows, and then the loss
# differs too, and the case is not as expected. That is no noise and no defect of chunking, but a property of a
# machine. No such machine has been seen yet, so the difference is not allowed in advance.
chunked_vs_unchunked = replace(_base, name="chunked_vs_unchunked", candidate="eager")

CASES = (early_accumulation, chunked_vs_unchunked)
