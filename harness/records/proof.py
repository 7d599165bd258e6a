"""What a static proof said of a case before it ran. docs/explanation/proving.md says what that means."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING


class ProofVerdict(enum.StrEnum):
    """The outcome of a proof: see `harness.prove.answers`. NOT TRIED where it was not asked for, or could not be."""

    PROVED = "PROVED"
    NOT_PROVED = "NOT PROVED"
    REFUSED = "REFUSED"
    NOT_TRIED = "NOT TRIED"


@dataclass(frozen=True, kw_only=True)
class ProofOutcome:
    """One case's proof: how many outputs of the step got which answer, and why not all are proved, in words.

    `unproved` has the first outputs that are not proved, `first` what the two sides do differently in the very first.
    `assumptions` is what the proof rests on. `laid_out_otherwise` has the first outputs that are PROVED and lie
    otherwise in memory on either side, `otherwise` is their number: what follows the step may depend on it.
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
        """How many outputs have an answer."""
        return self.proved + self.not_proved + self.refused
