"""What came of solving for placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING, That

Cost = Annotated[float, That("zero or more", lambda found: found >= 0, {"minimum": 0})]


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """Where parameters lie on the mesh: those of one name in all layers of a kind.

    `data` and `tensor` are placements on the two axes: R whole on each rank, S0 and S1 sharded along that dim. `cost`
    is in microseconds of a step, of its gathers and the sums of its gradient over data ranks; `bytes` are what a rank
    holds for it: values, gradient, optimizer state and a gathered copy. Both count all `copies` in the model.
    """

    __pydantic_config__ = GROWING

    name: str
    copies: Count
    data: str
    tensor: str
    cost: Cost
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A solution: its cost in microseconds of a step, the bytes that a rank holds, and the bound that they keep.

    `least` is the smallest bound that could be kept. `gap` is the relative gap between the solution and what the solver
    proved. `beside` has cost and bytes of plans written by hand. The program had `nodes` and `edges`, and the solver's
    `variables` and `constraints`. `sha256` is the plan's: every rank states it.
    """

    __pydantic_config__ = GROWING

    source: str
    cost: Cost
    bytes: Count
    bound: Count
    least: Count
    gap: Cost
    nodes: Count
    edges: Count
    variables: Count
    constraints: Count
    seconds: Cost
    sha256: str
    split: list[str]
    parameters: list[PlacedTensor]
    beside: dict[str, list[Cost]] = field(default_factory=dict)

    def tell(self) -> list[tuple[str, str]]:
        """What reports show of it, as names and values."""
        by_hand: Mapping[str, list[float]] = self.beside
        return [
            ("placements from", self.source),
            ("cost", f"{self.cost:.1f} us a step"),
            *(
                (f"cost of {name}", f"{cost:.1f} us, {held / 2**20:.3f} MiB a rank")
                for name, (cost, held) in by_hand.items()
            ),
            (
                "bytes of a rank",
                f"{self.bytes / 2**20:.3f} MiB of {self.bound / 2**20:.3f} MiB, at least {self.least / 2**20:.3f}",
            ),
            ("gap that the solver proved", f"{self.gap:g}"),
            (
                "program",
                f"{self.nodes} nodes, {self.edges} edges; {self.variables} variables, {self.constraints} constraints",
            ),
            ("seconds", f"{self.seconds:.2f}"),
            ("layers split over the tensor axis", ", ".join(self.split) or "none"),
            ("plan", self.sha256[:16]),
        ]

    def rows(self) -> list[tuple[str, str, str, str, int]]:
        """What reports show of the parameters."""
        return [(x.name, x.data, x.tensor, f"{x.cost:.1f}", x.bytes) for x in self.parameters]
