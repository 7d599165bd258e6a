"""A module that returns its input. A case can observe it to record a value before it is rounded."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """The identity, as a module whose output a case can record (`observe` in `harness.case.Case`).

    It is used in three places:

    - before a cast to a narrower dtype: its output is the value that forward rounds
    - after a cast to float32: its gradient is the value that backward rounds
    - on a term of a sum: its output has the last bits, which the sum may lose
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


def wides(*names: str) -> nn.ModuleDict:
    """Return a `Wide` for each name, so that a case can record the values that pass through it."""
    return nn.ModuleDict({name: Wide() for name in names})
