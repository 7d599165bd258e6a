"""The results of two searches: for the first pass that changes bits, and for a smaller case."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bitproof.harness.records.divergence import Divergence
from bitproof.harness.records.result import CaseResult, Verdict

TRACE = "trace"
"""The name of the empty prefix of the pass list: the step as it was traced."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run of the case with a prefix of the pass list, or with only some of the regions chunked.

    `applied` names the prefix or the regions. `reference` is the system with which the run was compared. `seconds`
    includes the reference's run if that was recorded for this probe.
    """

    applied: str
    reference: str
    verdict: Verdict
    seconds: float


@dataclass(kw_only=True)
class Bisection:
    """The result of a search, possibly unfinished.

    `suspects` are the passes that may be to blame; at the end a single pass is left, or "trace" if tracing alone
    differs. `equal` is the last pass of the longest prefix that was EQUAL. `result` is the result of the whole case.
    `region_result` is the result with a single region chunked that differs alone. `problem` and `region_problem` say
    why the search for a pass or a region ended early.
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
        """The pass to blame, "trace" if tracing alone differs, None if the search has no answer."""
        return self.suspects[0] if len(self.suspects) == 1 and self.problem is None else None

    @property
    def region(self) -> str | None:
        """The region that differs even if no other is chunked; None if none was found."""
        return self.regions[0] if self.region_result is not None else None

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence of the systems. If a region differs alone, it is that of the case with this region
        chunked."""
        result = self.region_result or self.result
        return result.first_divergence if result else None


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """The result of shrinking a failing case.

    `result` is the result of the small case, or of the case itself if there was nothing to shrink; None if the search
    was interrupted. `symptom` is the failure in words, if the small case failed in the same way once more. `case_file`
    contains the small case. `file` is a file of plain Python that fails without bitproof, if there is one.
    `exit_status` is the command's exit status.
    """

    exit_status: int
    result: CaseResult | None = None
    symptom: str | None = None
    extra_passes: tuple[str, ...] = ()
    case_file: Path | None = None
    file: Path | None = None
