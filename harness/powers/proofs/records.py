"""The result of a static proof of a case; docs/explanation/proving.md explains it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING


class ProofVerdict(enum.StrEnum):
    """The outcome of a proof. NOT TRIED: no proof was requested, or none was possible."""

    PROVED = "PROVED"
    NOT_PROVED = "NOT PROVED"
    REFUSED = "REFUSED"
    NOT_TRIED = "NOT TRIED"


@dataclass(frozen=True, kw_only=True)
class ProofOutcome:
    """The proof of a case: how many outputs of its step (loss, gradients) are proved, not proved and refused.

    - `reason`: why the case is REFUSED or NOT TRIED, or why its first refused output is REFUSED.
    - `unproved`: the first outputs that are not proved.
    - `first`: for the first output in `unproved`, the calls at which the two systems begin to differ.
    - `otherwise`: how many PROVED outputs have different strides in the two systems; code after the step may depend on
      strides.
    - `laid_out_otherwise`: the names of the first outputs that `otherwise` counts.
    """

    __pydantic_config__ = GROWING

    verdict: ProofVerdict
    proved: Count = 0
    not_proved: Count = 0
    refused: Count = 0
    reason: str | None = None
    unproved: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    seconds: float | None = None
    otherwise: Count = 0
    laid_out_otherwise: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> int:
        """The number of outputs with an answer."""
        return self.proved + self.not_proved + self.refused
