"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467).

D model dim
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitproof.reference.layers.wide import wides


class RMSNorm(nn.Module):
    """Computes weight * x / sqrt(mean(x^2) + eps) over the last dim, in float32. The result has x's dtype."""

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.wide = wides("x", "square", "mean", "inverse", "normed", "weight", "y")

    def forward(self, x_D: Tensor) -> Tensor:
        wide_D = self.wide["x"](x_D.float())
        mean = self.wide["mean"](self.wide["square"](wide_D.square()).mean(-1, keepdim=True) + self.eps)
        normed_D = self.wide["normed"](wide_D * self.wide["inverse"](torch.rsqrt(mean)))
        y_D: Tensor = self.wide["y"](normed_D * self.wide["weight"](self.weight.float()))
        return y_D.to(x_D.dtype)
