"""What a search for the pass that first changes bits found, and one for a smaller case."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bitproof.harness.records.divergence import Divergence
from bitproof.harness.records.result import CaseResult, Verdict

TRACE = "trace"
"""What the empty prefix is called."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One run of a prefix of the pass list, or of some of the chunked regions. `reference` is its reference.

    `seconds` are its own, with those of a reference that had to be recorded for it.
    """

    applied: str
    reference: str
    verdict: Verdict
    seconds: float


@dataclass(kw_only=True)
class Bisection:
    """What a search found, as far as it got.

    `suspects` are the passes that may be to blame; one is left at the end, "trace" where tracing alone differs.
    `equal` is the pass with which the longest prefix found EQUAL ends. `result` is the case's own, `region_result`
    that of the one region that differs alone. `problem` says why the search ended early.
    """

    suspects: tuple[str, ...] = ()
    equal: str | None = None
    probes: list[Probe] = field(default_factory=list)
    regions: tuple[str, ...] = ()
    region_probes: list[Probe] = field(default_factory=list)
    result: CaseResult | None = None
    region_result: CaseResult | None = None
    problem: str | None = None
    region_problem: str | None = None

    @property
    def blamed(self) -> str | None:
        """The pass to blame, "trace" for none of them, None where there is no answer."""
        return self.suspects[0] if len(self.suspects) == 1 and self.problem is None else None

    @property
    def region(self) -> str | None:
        """The chunked region that differs alone, if one was found."""
        return self.regions[0] if self.region_result is not None else None

    @property
    def divergence(self) -> Divergence | None:
        """Where the systems first part: in the one region, if that was found."""
        result = self.region_result or self.result
        return result.first_divergence if result else None


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """What came of making a failing case small.

    `result` is that of the small case, or of the case itself where there was nothing to shrink, and None where the
    search was interrupted. `symptom` is how it fails, in words, where the small case was seen to fail so once more.
    `case_file` holds the small case, and `file`, where one could be written, is plain Python that fails alone.
    `exit_status` is the command's.
    """

    exit_status: int
    result: CaseResult | None = None
    symptom: str | None = None
    extra_passes: tuple[str, ...] = ()
    case_file: Path | None = None
    file: Path | None = None
