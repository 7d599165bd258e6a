"""A module that returns its input. It names a value that is computed in float32 and then rounded, so that a case can
observe the value."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """The identity, as a module whose output a case can record: see `observe` in `harness.case.Case`.

    After a cast to float32, the gradient of its output is the value that backward rounds. Before a cast to a narrower
    dtype, its output is the value that forward rounds. On a term of a sum, its output shows the last bits that the sum
    may lose.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns x itself."""
        return x


def wides(*names: str) -> nn.ModuleDict:
    """A `Wide` for each name, so that a case can record the values that pass through it."""
    return nn.ModuleDict({name: Wide() for name in names})
