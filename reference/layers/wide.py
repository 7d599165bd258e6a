"""Names for what a module computes in float32 and then rounds, so that a case can observe it."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """Hands a tensor on as it is. It is a module's boundary: see `observe` in `harness.case.Case`.

    After a cast to float32, the gradient of what it returns is what backward rounds; before a cast to a narrower dtype,
    what it returns is what forward rounds; and a summand is one whose last bit a sum may lose.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns x itself."""
        return x


def wides(*names: str) -> nn.ModuleDict:
    """A boundary for each name, without parameters or buffers."""
    return nn.ModuleDict({name: Wide() for name in names})
