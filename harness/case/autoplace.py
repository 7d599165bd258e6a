"""Define how a case requests placements of parameters that a solver chooses, and the resulting plan.

A plan is part of the case, so every recording's manifest contains it. Users may write a plan by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bitproof.harness.case.bounds import MIB
from bitproof.harness.errors import CaseError
from bitproof.harness.validate import STRICT

if TYPE_CHECKING:
    from bitproof.harness.case.case import Case


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placements that differ from the default, which splits no layer and shards all parameters.

    - `split`: layers that a tensor group shares, such as layers.0.attention.
    - `replicated`: parameters that are whole on each rank.
    """

    __pydantic_config__ = STRICT

    split: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Autoplace:
    """A case's request for placements of parameters that a linear program chooses.

    - `memory_mib`: the limit of a rank's memory, in MiB.
    - `source`: always "solver" so far.
    - `plan`: the solution; None until the program is solved.
    """

    __pydantic_config__ = STRICT

    memory_mib: float
    source: str = "solver"
    plan: Plan | None = None

    def __post_init__(self) -> None:
        MIB.check("autoplace.memory_mib", self.memory_mib)
        # The bounds include 0, but no model fits into 0 MiB.
        if self.memory_mib == 0 or self.source != "solver":
            raise CaseError(
                "placements are asked for in an unknown way",
                expected="a memory_mib > 0, and source solver",
                found=f"memory_mib={self.memory_mib}, source={self.source!r}",
            )


def with_plan(case: Case, plan: Plan) -> Case:
    assert case.autoplace is not None
    return replace(case, autoplace=replace(case.autoplace, plan=plan))
