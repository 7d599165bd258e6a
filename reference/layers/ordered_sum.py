"""A sum with a stated order."""

from __future__ import annotations

from torch import Tensor


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim` in ascending index order: ((x[0] + x[1]) + x[2]) + ...

    A reduction kernel may choose its order by the tensor's shape and strides; these additions have a fixed order. The
    size of `dim` must be static, since each index is an addition of its own. The result has x's dtype and lacks `dim`.
    """
    first, *rest = x.unbind(dim)
    total = first
    for term in rest:
        total = total + term
    return total
