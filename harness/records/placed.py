"""The solution of the placement problem: how each parameter is placed on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING, That

Cost = Annotated[float, That("zero or more", lambda found: found >= 0, {"minimum": 0})]


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """The placement of a parameter on the mesh. Parameters of the same name in all layers of a kind are one entry.

    - `data`, `tensor`: the placements on the two axes of the mesh. R: whole on each rank. S0, S1: sharded along dim 0
      or 1.
    - `copies`: the number of such parameters in the model. `cost` and `bytes` are totals over them.
    - `cost`: microseconds per step for gathering the parameter and summing its gradient over data ranks.
    - `bytes`: the memory that a rank needs for values, gradient, optimizer state and a gathered copy.
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
    """A solution of the placement problem: its cost in microseconds per step, and the bytes that a rank needs.

    - `bound`: the largest number of bytes that a rank may use.
    - `least`: the smallest bound for which there is a solution.
    - `gap`: the relative gap between the cost and the solver's proven lower limit.
    - `beside`: for comparison, cost and bytes of plans written by hand, by name.
    - `nodes`, `edges`: the size of the placement problem.
    - `variables`, `constraints`: the size of its linear program.
    - `sha256`: identifies the plan; every rank reports it.
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

    def table_rows(self) -> list[tuple[str, str]]:
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

    def rows(self) -> list[tuple[str, ...]]:
        return [(x.name, x.data, x.tensor, f"{x.cost:.1f}", str(x.bytes)) for x in self.parameters]
