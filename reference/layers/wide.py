"""Where a module computes in float32, with names for what goes in and comes out."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """Hands a tensor on as it is. It stands next to a cast, so that a case can observe what the cast rounds.

    After a cast to float32, the gradient of what it returns is what backward rounds; before a cast to a narrower dtype,
    what it returns is what forward rounds.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns x itself."""
        return x
