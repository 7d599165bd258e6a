"""Names for values that a module computes in float32 and then rounds, so that a case can observe them."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """The identity, as a module boundary that a case can observe: see `observe` in `harness.case.Case`.

    Placed after a cast to float32, its output's gradient is the value that backward rounds; placed before a cast to a
    narrower dtype, its output is the value that forward rounds; placed at a summand, it shows the last bits that a sum
    may lose.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns x itself."""
        return x


def wides(*names: str) -> nn.ModuleDict:
    """A boundary per name, without parameters or buffers."""
    return nn.ModuleDict({name: Wide() for name in names})
