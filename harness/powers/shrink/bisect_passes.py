"""Finds the pass that first changes the bits, by running the case with only its first passes.

1. Run the case. The verdict must be DIFFERENT, which implies that each system repeats its bits.
2. A prefix is a run with only the first passes of the list. The empty prefix only traces the step; the longest prefix
   has all passes and the backend.
3. Guess the last pass that changed the number of nodes of the operator that differs first. The guess is right if the
   prefix before this pass is EQUAL, and the prefix that ends with this pass is DIFFERENT.
4. Otherwise bisect the remaining passes. For n passes, log2(n) + 4 runs are enough.
5. If the pass is chunk, and it chunks several modules (regions), bisect these regions in the same way, in both systems.

Example, for the passes clean_up, chunk, bucket: "until chunk" is EQUAL and "until bucket" is DIFFERENT, so the answer
is bucket. A later pass may undo a difference. Then several passes turn EQUAL into DIFFERENT, and any of them may be
found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from bitproof.harness.case import COMPILED, TRACED, Case, Chunking
from bitproof.harness.case.bounds import LONGEST_NAME
from bitproof.harness.commands.localize import any_difference
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import BitproofError, CaseError, RecordingError
from bitproof.harness.files.folder_names import longer_name
from bitproof.harness.options import Role, RunOptions
from bitproof.harness.powers.shrink.records import TRACE, Bisection, Probe
from bitproof.harness.records import CaseResult, Recording, Verdict
from bitproof.harness.systems.registry import BUILT_IN

CHUNK = "chunk"

T = TypeVar("T")


class ComparedRun(Protocol):
    """The interface through which the search runs a case: both systems together, or one of them.

    If the case requests placements, `case` contains their plan after a run.
    """

    case: Case

    def result(self) -> CaseResult:
        """Run both systems, and return the verdict and its reasons."""
        ...

    def record(self, role: Role, arm: str) -> Any:
        """Run one system, the "reference" or the "candidate". `arm` names the run, for example "first"."""
        ...

    def recording(self, role: Role) -> Recording:
        """Return the recording of a system's first run."""
        ...


def check_case(case: Case) -> None:
    """Raise CaseError for a case whose systems have no passes to bisect."""
    # A reference with passes would change with each prefix, and nothing would be left to compare with.
    if case.candidate not in (*TRACED, COMPILED) or case.reference in TRACED:
        is_own = case.candidate in BUILT_IN and case.reference in BUILT_IN
        raise CaseError(
            f"case {case.name} has no passes to bisect",
            expected=f"a candidate among {', '.join((*TRACED, COMPILED))}, and a reference that has no passes",
            found=f"reference {case.reference}, candidate {case.candidate}",
            fix="choose another case, or give --candidate graph"
            if is_own
            else "give --candidate compiled, whose stages are known, or ask bitproof localize for the call to blame",
        )


def halve(
    suspects: Sequence[T], differs: Callable[[Sequence[T]], bool], guess: T | None = None
) -> Iterator[Sequence[T]]:
    """Bisect: yield ever fewer suspects, until only one remains.

    `differs` takes the first part of the suspects, and returns whether the wanted one is in it. A `guess` is tried
    first. For example, for the suspects a, b, c, d and the guess c, `differs` is called with a, b, and then with c.
    """
    while len(suspects) > 1:
        # The half before the guess may be empty: then the guess itself is asked for.
        end = max(1, suspects.index(guess)) if guess in suspects else len(suspects) // 2
        suspects = suspects[:end] if differs(suspects[:end]) else suspects[end:]
        yield suspects


class Bisector:
    """A search for the first pass that changes a case's bits. `found` has the result so far.

    Each run has its own case, whose name begins with the name of the searched case.
    """

    def __init__(
        self,
        case: Case,
        options: RunOptions,
        run_of: Callable[[Case, RunOptions], ComparedRun],
        on_probe: Callable[[Probe], None] = lambda probe: None,
    ) -> None:
        # The search is about any differing bit, whatever verdict the case expects.
        self.case = any_difference(case)
        self.options = options
        self.found = Bisection()
        self._run_of = run_of
        self._on_probe = on_probe
        self._pass_list: tuple[str, ...] = ()
        self._references: dict[str, Recording] = {}
        self._num_steps = case.steps

    def search(self) -> None:
        """Find the pass that first changes bits and, if it is the chunk pass, the region (the chunked module).

        An error ends the search and becomes `found.problem`, or `found.region_problem` if the pass was already found.
        """
        if not self._run_whole():
            return
        try:
            for suspects in halve(self.found.suspects, self._prefix_differs, self._guess()):
                self.found.suspects = tuple(suspects)
        except BitproofError as error:
            self.found.problem = f"a prefix could not be judged\n{error}"
            return
        # Before the second search, whose failure must not hide the pass.
        self._name_pass(self.found.result)
        if self.found.blamed == CHUNK:
            self._search_regions()

    def _run_whole(self) -> bool:
        # Write the graphs as well, so that the user can see the effect of the pass.
        run = self._run_of(self.case, replace(self.options, dump_graphs=True))
        result = self.found.result = run.result()
        # With solved placements: prefixes must not solve them again.
        self.case = run.case
        self._note(self.found.probes, "all passes", self.case, result.verdict, result.seconds.total or 0.0)
        if result.verdict == Verdict.EQUAL:
            return False
        if result.verdict != Verdict.DIFFERENT or result.first_divergence is None:
            self.found.problem = f"the case itself is {result.verdict}\n{result.error}"
            return False
        self._pass_list = (TRACE, *(entry.name for entry in result.passes))
        self.found.suspects = self._pass_list
        # Steps after the first differing step cannot change whether a prefix differs.
        self._num_steps = result.first_divergence.step + 1
        self._references[self.case.reference] = run.recording("reference")
        return True

    def _guess(self) -> str | None:
        result = self.found.result
        first = result.first_divergence if result else None
        if result is None or first is None or first.call is None:
            return None
        operator = first.call.operator
        return next((entry.name for entry in reversed(result.passes) if operator in entry.changed), None)

    def _prefix_differs(self, half: Sequence[str]) -> bool:
        index = self._pass_list.index(half[-1])
        verdict = self._judge_candidate(self._case_with_prefix(index), self.found.probes, f"until {half[-1]}")
        if verdict == Verdict.EQUAL:
            # The suspects only shrink, so the last EQUAL prefix is the longest one.
            self.found.equal = half[-1]
        return verdict == Verdict.DIFFERENT

    def _case_with_prefix(self, index: int) -> Case:
        # Without the chunk pass the candidate does not chunk, so neither may its reference.
        chunks = CHUNK in self._pass_list[: index + 1] or self.case.chunking is None
        # The name of a case has only lower-case letters, digits and underscores.
        label = re.sub(r"[^a-z0-9_]", "_", self._pass_list[index].lower())
        return replace(
            self.case,
            name=longer_name(self.case.name, f"_until_{index}_{label}", LONGEST_NAME),
            reference=self.case.reference if chunks else "eager",
            steps=self._num_steps,
            pipeline=replace(self.case.pipeline, until=self._pass_list[index] if index else ""),
        )

    def _judge_candidate(self, case: Case, probes: list[Probe], applied: str) -> Verdict:
        """Run the candidate of a case with some passes, compare it with its reference, and add the run to `probes`.

        `applied` describes the passes or regions of this run. Raises BitproofError if there is no verdict.
        """
        began = time.monotonic()
        run = self._run_of(case, self.options)
        try:
            run.record("candidate", "first")
            comparison = compare(self._reference_recording(case, run), run.recording("candidate"), case)
        except BitproofError:
            self._note(probes, applied, case, Verdict.ERROR, time.monotonic() - began)
            raise
        self._note(probes, applied, case, comparison.verdict, time.monotonic() - began)
        # Neither EQUAL nor DIFFERENT: the search cannot go on from here.
        if comparison.verdict == Verdict.UNVERIFIED:
            raise RecordingError(f"{applied}: the recordings cannot be compared", found=comparison.reason)
        return comparison.verdict

    def _reference_recording(self, case: Case, run: ComparedRun) -> Recording:
        # References are reused by the system's name. A reference that chunks only some regions has the same name as
        # others, but other bits, so it is recorded each time.
        if case.chunking and case.chunking.only:
            run.record("reference", "first")
            return run.recording("reference")
        if case.reference not in self._references:
            run.record("reference", "first")
            self._references[case.reference] = run.recording("reference")
        return shared_reference(self._references[case.reference], case)

    def _search_regions(self) -> None:
        found = self.found
        assert self.case.chunking is not None and found.result is not None
        chunking = self.case.chunking
        if self.case.reference != "eager_chunked":
            found.region_problem = f"whether {self.case.reference} can chunk one region alone is not known"
            return
        # Only up to the chunk pass, so that later passes add no difference of their own.
        prefix = self._case_with_prefix(self._pass_list.index(CHUNK))
        [chunk] = [entry for entry in found.result.passes if entry.name == CHUNK]
        found.regions = tuple(name for own in chunk.by_stage for name in own.get("modules", ()))

        # The last regions that differed together. They are reported if the remaining region alone is EQUAL.
        together = found.regions

        def differs(half: Sequence[str]) -> bool:
            nonlocal together
            case = self._case_with_regions(prefix, chunking, half)
            verdict = self._judge_candidate(case, found.region_probes, f"chunk in {', '.join(half)}")
            together = tuple(half) if verdict == Verdict.DIFFERENT else together
            return verdict == Verdict.DIFFERENT

        try:
            for regions in halve(found.regions, differs):
                found.regions = tuple(regions)
        except BitproofError as error:
            found.region_problem = f"a region could not be judged\n{error}"
            return
        case = self._case_with_regions(prefix, chunking, found.regions)
        # A whole run of both systems, unlike the probes: it also finds the call to blame.
        result = self._run_of(case, self.options).result()
        applied = f"chunk in {found.regions[0]}, by itself"
        self._note(found.region_probes, applied, case, result.verdict, result.seconds.total or 0.0)
        if result.verdict == Verdict.DIFFERENT:
            self._name_pass(result)
            found.region_result = result
        else:
            found.region_problem = (
                f"{found.regions[0]} alone is {result.verdict}; these differ when they are chunked together: "
                + ", ".join(together)
            )

    def _case_with_regions(self, prefix: Case, chunking: Chunking, regions: Sequence[str]) -> Case:
        name = longer_name(self.case.name, f"_region_{len(self.found.region_probes)}", LONGEST_NAME)
        return replace(prefix, name=name, chunking=replace(chunking, only=tuple(regions)))

    def _name_pass(self, result: CaseResult | None) -> None:
        # If tracing alone differs, for example because of an injected fault, no pass is the cause.
        if result is not None and result.first_divergence is not None and self.found.blamed != TRACE:
            result.first_divergence.pass_ = self.found.blamed

    def _note(self, probes: list[Probe], applied: str, case: Case, verdict: Verdict, seconds: float) -> None:
        probes.append(Probe(applied=applied, reference=case.reference, verdict=verdict, seconds=seconds))
        self._on_probe(probes[-1])


def shared_reference(recording: Recording, case: Case) -> Recording:
    """Reuse a reference's recording for `case`, which may have other passes and fewer steps.

    Return the recording with the settings of `case`. This is right because passes do not change the bits of a reference
    without a graph. Raises RecordingError for a reference with a graph.
    """
    manifest = recording.manifest
    # Passes do not affect a reference without a graph, so a new run would record the same bits.
    if manifest.graph is not None:
        raise RecordingError("a reference that has passes must be recorded for each prefix", found=manifest.system)
    recording = recording.first_steps(case.steps)
    # The pipeline's `until` is that of the new case; all other settings are those that were recorded.
    values = {name: value for name, value in recording.manifest.case.items() if name != "pipeline"}
    pipeline = {name: value for name, value in manifest.case.get("pipeline", {}).items() if name != "until"}
    # A case of a user's systems states no default.
    stated = case.stated().get("pipeline", {})
    pipeline |= {"until": stated["until"]} if "until" in stated else {}
    return recording.with_manifest(
        replace(recording.manifest, case=values | ({"pipeline": pipeline} if pipeline else {}))
    )
