"""Registers a shape function that torch lacks: the grouped matrix product of fake tensors in float32.

Torch multiplies groups in float32, but its shape function only accepts bfloat16. Importing this module registers the
function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitproof.harness.torch_compat import FakeTensorMode, OpOverload, register_op_impl


def _is_grouped_mm(operator: OpOverload) -> bool:
    return operator is torch.ops.aten._grouped_mm.default


# Registered with a predicate, so that a release with its own registration takes precedence without a conflict.
@register_op_impl(_is_grouped_mm)
def grouped_mm(mode: FakeTensorMode, operator: Any, a: Tensor, b: Tensor, *others: Any, **options: Any) -> Any:
    """Return the fake result of a grouped product in float32, with the layout of a bfloat16 product.

    Returns NotImplemented for other dtypes, which torch handles itself.
    """
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return NotImplemented
    # torch 2.11 to 2.15: `_meta_grouped_mm_common` in torch/_meta_registrations.py accepts only bfloat16. A bfloat16
    # product may pad its rows to 16 bytes, but not if rows have a multiple of 8 elements, as in experts.
    return operator(a.bfloat16(), b.bfloat16(), *others, **options).float()
