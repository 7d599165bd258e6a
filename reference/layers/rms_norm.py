"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467).

D model dim
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalize each row of the last dim; leading dims are free."""
        wide_D = x_D.float()
        inverse_rms = torch.rsqrt(wide_D.square().mean(-1, keepdim=True) + self.eps)
        return (wide_D * inverse_rms * self.weight.float()).to(x_D.dtype)
