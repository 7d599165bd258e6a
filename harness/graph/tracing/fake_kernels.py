"""What fake tensors lack: shapes of a grouped matrix product in float32.

torch multiplies groups in float32, but its shape function takes bfloat16 alone (2.11 to 2.15,
`_meta_grouped_mm_common` in torch/_meta_registrations.py). A float32 product gets the layout that a bfloat16
one has, whose rows may be padded to 16 bytes: no difference to rows of a multiple of 8 elements, as experts
have. Importing this module is what teaches it; `fake_mode` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitproof.harness.torch_compat import FakeTensorMode, OpOverload, register_op_impl


def _is_grouped_mm(operator: OpOverload) -> bool:
    return operator is torch.ops.aten._grouped_mm.default


# By a predicate: a release that registers the operator itself then comes first, and nothing collides.
@register_op_impl(_is_grouped_mm)
def grouped_mm(mode: FakeTensorMode, operator: Any, a: Tensor, b: Tensor, *others: Any, **options: Any) -> Any:
    """The fake result of a float32 product; NotImplemented, which hands it back to torch, for all others."""
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return NotImplemented
    return operator(a.bfloat16(), b.bfloat16(), *others, **options).float()
