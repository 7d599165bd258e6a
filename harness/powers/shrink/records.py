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
    """A run of a search: the case with only the first passes of its list, or with only some of its regions chunked.

    `applied` says which passes or regions, such as "until chunk". `reference` is the system that the candidate was
    compared with. `seconds` includes running the reference, if it was not yet recorded.
    """

    applied: str
    reference: str
    verdict: Verdict
    seconds: float


@dataclass(kw_only=True)
class Bisection:
    """The result of a search for the pass that first changes bits, possibly unfinished.

    `suspects` are the passes that may be to blame; at the end a single one is left, which is "trace" if tracing without
    any pass already differs. `equal` is the last pass of the longest list that was EQUAL. `result` is the result of the
    case with all passes. `region_result` is the result with a single region chunked, if it differs. `problem` and
    `region_problem` are the reasons why the search for a pass or a region ended without an answer.
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
        """The pass to blame, "trace" if tracing without any pass already differs, None if there is no answer."""
        return self.suspects[0] if len(self.suspects) == 1 and self.problem is None else None

    @property
    def region(self) -> str | None:
        """The region (module) that makes a difference even if no other is chunked; None if none was found."""
        return self.regions[0] if self.region_result is not None else None

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence of the two systems: with only the found region chunked if any, else with all passes."""
        result = self.region_result or self.result
        return result.first_divergence if result else None


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """The result of shrinking a failing case.

    `result` is the result of the small case, or of the case itself if there was nothing to shrink; None if the search
    was interrupted. `symptom` is the failure in words; None unless a last run of the small case failed in the same way.
    `case_file` contains the small case. `file` is a Python file that shows the failure, None if there is none.
    `exit_status` is the command's exit status.
    """

    exit_status: int
    result: CaseResult | None = None
    symptom: str | None = None
    extra_passes: tuple[str, ...] = ()
    case_file: Path | None = None
    file: Path | None = None
