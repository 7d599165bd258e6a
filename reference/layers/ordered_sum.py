"""A sum with a stated order."""

from __future__ import annotations

from torch import Tensor


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim` in ascending index order: ((x[0] + x[1]) + x[2]) + ...

    The size of `dim` must be static, since each index is a separate addition. The result has x's dtype, without `dim`.
    """
    # Not `sum`: a reduction kernel may choose its order by the tensor's shape and strides.
    first, *rest = x.unbind(dim)
    total = first
    for term in rest:
        total = total + term
    return total
