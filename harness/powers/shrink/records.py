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

    - `applied`: the passes or regions of this run as text, such as "until chunk".
    - `reference`: the system that the candidate was compared with.
    - `seconds`: the time of the run. If the reference had to be recorded first, the time for that is included.
    """

    applied: str
    reference: str
    verdict: Verdict
    seconds: float


@dataclass(kw_only=True)
class Bisection:
    """The result of a search for the pass that first changes bits. The search may be unfinished.

    The search runs the case with only the first passes of its list (a prefix). If the pass `chunk` is to blame, a
    second search runs it with only some regions. A region is a module that is chunked.

    - `suspects`: the passes that may be to blame. If tracing alone changes bits, only "trace" is left.
    - `equal`: the last pass of the longest prefix whose verdict was EQUAL; None if there is no such prefix.
    - `probes`, `region_probes`: the runs of the first search, and of the second.
    - `regions`: the regions that may be to blame.
    - `result`: the result of the case with all passes.
    - `region_result`: the result with only the found region chunked; None unless the systems then differ.
    - `problem`, `region_problem`: why the search for a pass or a region found no answer.
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

    - `result`: the result of the small case, or of the case itself if it cannot be shrunk. None if the search was
      interrupted.
    - `symptom`: the failure in words. None unless the small case failed in the same way when it ran again.
    - `case_file`: the file with the small case.
    - `file`: a Python file that shows the failure, or None.
    - `exit_status`: the command's exit status.
    """

    exit_status: int
    result: CaseResult | None = None
    symptom: str | None = None
    extra_passes: tuple[str, ...] = ()
    case_file: Path | None = None
    file: Path | None = None
