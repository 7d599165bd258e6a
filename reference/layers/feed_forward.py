"""The gated feed-forward layer, SwiGLU (Shazeer 2020, arXiv:2002.05202).

D model dim, F hidden dim
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class FeedForward(nn.Module):
    """Computes w2(silu(w1(x)) * w3(x)) over the last dim, in x's dtype."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_D: Tensor) -> Tensor:
        hidden_F = functional.silu(self.w1(x_D)) * self.w3(x_D)
        y_D: Tensor = self.w2(hidden_F)
        return y_D
