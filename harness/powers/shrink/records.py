"""The results of two searches: for the first pass that changes bits, and for a smaller case."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bitproof.harness.records.divergence import Divergence
from bitproof.harness.records.result import CaseResult, Verdict

TRACE = "trace"
"""Name of the empty list of passes: the step as it was traced."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run of a search: the case with only some of its passes, or with only some of its regions (modules) chunked.

    - `applied`: the passes or regions of this run in words, such as "until chunk".
    - `reference`: the system with which the candidate was compared.
    - `seconds`: duration of the run, including the reference's recording if it was needed.
    """

    applied: str
    reference: str
    verdict: Verdict
    seconds: float


@dataclass(kw_only=True)
class Bisection:
    """The result of a search for the pass that first changes bits. The search may be unfinished.

    The search runs the case with prefixes of its list of passes; a prefix has only the first passes. If the pass
    `chunk` is the answer, a second search runs it with only some regions (chunked modules).

    - `suspects`: passes that are still possible; only "trace" if tracing alone changes bits.
    - `equal`: last pass of the longest prefix whose result was EQUAL; None if there is none.
    - `probes`, `region_probes`: runs of the first and the second search.
    - `regions`: regions that are still possible.
    - `result`: result of the case with all passes.
    - `region_result`: result with only the found region chunked; None unless the systems then differ.
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
        """The found pass; "trace" if tracing without any pass already differs; None if there is no answer."""
        return self.suspects[0] if len(self.suspects) == 1 and self.problem is None else None

    @property
    def region(self) -> str | None:
        """The region (module) that makes a difference even if it alone is chunked; None if none was found."""
        return self.regions[0] if self.region_result is not None else None

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence in the run with only the found region (module) chunked.

        If no region was found, the first divergence in the run with all passes.
        """
        result = self.region_result or self.result
        return result.first_divergence if result else None


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """The result of shrinking a failing case.

    - `result`: result of the small case, or of the original case if it cannot be shrunk; None if the search was
      interrupted.
    - `symptom`: the failure in words; None unless the small case failed in the same way when it ran again.
    - `case_file`: file with the small case.
    - `file`: Python file that shows the failure, or None.
    - `exit_status`: exit status of the command.
    """

    exit_status: int
    result: CaseResult | None = None
    symptom: str | None = None
    extra_passes: tuple[str, ...] = ()
    case_file: Path | None = None
    file: Path | None = None
