"""Find the pass that first changes the bits, by applying prefixes of the pass list; for chunk, also the region.

1. Run the case. It must be DIFFERENT, so each of its systems agrees with itself.
2. The empty prefix only traces; the longest is the whole pass list with the backend. First test a guess, the last pass
   that changed the number of the blamed operator's nodes: if the prefix before it is EQUAL and the prefix that ends
   with it DIFFERENT, the guess is the answer, after at most 3 runs, the case's own included. Otherwise bisect the
   remaining suspects. For n passes, log2(n) + 4 runs are enough. Each prefix runs the candidate alone, up to the first
   differing step: a reference is recorded once.
3. If chunk is the answer and chunks several regions, bisect these: chunk only some of them, on both sides. Then run the
   remaining region by itself, and find the call to blame in it.

A prefix that ends before chunk is not chunked, so it is compared with eager; longer ones with the case's reference.

Example, for the passes clean_up, chunk, bucket: "until chunk" is EQUAL, and "until bucket" DIFFERENT, so the answer is
bucket. A later pass may undo a difference; then there are several such edges, and any of them may be found.
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
    """A case that can be run whole, or system by system: the interface through which the search runs cases.

    After its run, a case that asks for placements contains the planned placements.
    """

    case: Case

    def result(self) -> CaseResult:
        """Run both systems, and judge."""
        ...

    def record(self, role: Role, arm: str) -> Any:
        """Run a system; `arm` names the run, for example "first"."""
        ...

    def recording(self, role: Role) -> Recording:
        """The recording of a system's first run."""
        ...


def check_case(case: Case) -> None:
    """Raise CaseError for a case whose systems have no passes to bisect."""
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
    """Yield ever fewer suspects, at last a single suspect. `differs` decides whether the first half of them differs.

    This takes ceil(log2(n)) calls of `differs` for n suspects. With a `guess`, `differs` is first called with the
    suspects before the guess, and then with the guess alone. For example, with the suspects a b c d and the guess c, it
    is called with a b, then with c.
    """
    while len(suspects) > 1:
        # The half before the guess may be empty: then the guess itself is asked for.
        end = max(1, suspects.index(guess)) if guess in suspects else len(suspects) // 2
        suspects = suspects[:end] if differs(suspects[:end]) else suspects[end:]
        yield suspects


class Bisector:
    """A search for the pass; `found` has the result so far. The names of its runs' cases begin with the case's name."""

    def __init__(
        self,
        case: Case,
        options: RunOptions,
        run_of: Callable[[Case, RunOptions], ComparedRun],
        on_probe: Callable[[Probe], None] = lambda probe: None,
    ) -> None:
        self.case = any_difference(case)
        self.options = options
        self.found = Bisection()
        self._run_of = run_of
        self._on_probe = on_probe
        self._pass_list: tuple[str, ...] = ()
        self._references: dict[str, Recording] = {}
        self._num_steps = case.steps

    def search(self) -> None:
        """Find the pass, then the region. An error ends the search and becomes `found.problem`, or for the region
        `found.region_problem`.
        """
        if not self._run_whole():
            return
        try:
            for suspects in halve(self.found.suspects, self._prefix_differs, self._guess()):
                self.found.suspects = tuple(suspects)
        except BitproofError as error:
            self.found.problem = f"a prefix could not be judged\n{error}"
            return
        self._tell_pass(self.found.result)
        if self.found.blamed == CHUNK:
            self._search_regions()

    def _run_whole(self) -> bool:
        """Run the case itself. Returns whether it is DIFFERENT, so that there is a pass to search for."""
        # Write the graphs as well, so that the user can see the effect of the pass.
        run = self._run_of(self.case, replace(self.options, dump_graphs=True))
        result = self.found.result = run.result()
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
        """The last pass that changed the number of the blamed operator's nodes; None if there is none."""
        result = self.found.result
        first = result.first_divergence if result else None
        if result is None or first is None or first.call is None:
            return None
        operator = first.call.operator
        return next((entry.name for entry in reversed(result.passes) if operator in entry.changed), None)

    def _prefix_differs(self, half: Sequence[str]) -> bool:
        """Whether the prefix that ends with the last of `half` differs."""
        index = self._pass_list.index(half[-1])
        verdict = self._judge(self._prefix(index), self.found.probes, f"until {half[-1]}")
        if verdict == Verdict.EQUAL:
            self.found.equal = half[-1]
        return verdict == Verdict.DIFFERENT

    def _prefix(self, index: int) -> Case:
        """The case of the prefix that ends with the pass at `index`."""
        chunks = CHUNK in self._pass_list[: index + 1] or self.case.chunking is None
        label = re.sub(r"[^a-z0-9_]", "_", self._pass_list[index].lower())
        return replace(
            self.case,
            name=longer_name(self.case.name, f"_until_{index}_{label}", LONGEST_NAME),
            reference=self.case.reference if chunks else "eager",
            steps=self._num_steps,
            pipeline=replace(self.case.pipeline, until=self._pass_list[index] if index else ""),
        )

    def _judge(self, case: Case, probes: list[Probe], applied: str) -> Verdict:
        """Compare a prefix's candidate with its reference. Raises BitproofError if it cannot be judged."""
        began = time.monotonic()
        run = self._run_of(case, self.options)
        try:
            run.record("candidate", "first")
            comparison = compare(self._reference(case, run), run.recording("candidate"), case)
        except BitproofError:
            self._note(probes, applied, case, Verdict.ERROR, time.monotonic() - began)
            raise
        self._note(probes, applied, case, comparison.verdict, time.monotonic() - began)
        if comparison.verdict == Verdict.UNVERIFIED:
            raise RecordingError(f"{applied}: the recordings cannot be compared", found=comparison.reason)
        return comparison.verdict

    def _reference(self, case: Case, run: ComparedRun) -> Recording:
        """The recording of a case's reference: made now, or reused from an earlier prefix."""
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
        """Find the region that differs if the chunk pass chunks it alone."""
        found = self.found
        assert self.case.chunking is not None and found.result is not None
        chunking = self.case.chunking
        if self.case.reference != "eager_chunked":
            found.region_problem = f"whether {self.case.reference} can chunk one region alone is not known"
            return
        prefix = self._prefix(self._pass_list.index(CHUNK))
        [chunk] = [entry for entry in found.result.passes if entry.name == CHUNK]
        found.regions = tuple(name for own in chunk.by_stage for name in own.get("modules", ()))

        # The last regions that differed together. They are reported if the remaining region alone is EQUAL.
        together = found.regions

        def differs(half: Sequence[str]) -> bool:
            nonlocal together
            case = self._region(prefix, chunking, half)
            verdict = self._judge(case, found.region_probes, f"chunk in {', '.join(half)}")
            together = tuple(half) if verdict == Verdict.DIFFERENT else together
            return verdict == Verdict.DIFFERENT

        try:
            for regions in halve(found.regions, differs):
                found.regions = tuple(regions)
        except BitproofError as error:
            found.region_problem = f"a region could not be judged\n{error}"
            return
        case = self._region(prefix, chunking, found.regions)
        result = self._run_of(case, self.options).result()
        applied = f"chunk in {found.regions[0]}, by itself"
        self._note(found.region_probes, applied, case, result.verdict, result.seconds.total or 0.0)
        if result.verdict == Verdict.DIFFERENT:
            self._tell_pass(result)
            found.region_result = result
        else:
            found.region_problem = (
                f"{found.regions[0]} alone is {result.verdict}; these differ when they are chunked together: "
                + ", ".join(together)
            )

    def _region(self, prefix: Case, chunking: Chunking, regions: Sequence[str]) -> Case:
        name = longer_name(self.case.name, f"_region_{len(self.found.region_probes)}", LONGEST_NAME)
        return replace(prefix, name=name, chunking=replace(chunking, only=tuple(regions)))

    def _tell_pass(self, result: CaseResult | None) -> None:
        """Note the pass in a result's divergence, unless tracing alone differs, for example by an injected fault."""
        if result is not None and result.first_divergence is not None and self.found.blamed != TRACE:
            result.first_divergence.pass_ = self.found.blamed

    def _note(self, probes: list[Probe], applied: str, case: Case, verdict: Verdict, seconds: float) -> None:
        probes.append(Probe(applied=applied, reference=case.reference, verdict=verdict, seconds=seconds))
        self._on_probe(probes[-1])


def shared_reference(recording: Recording, case: Case) -> Recording:
    """A recording of a reference, made for another prefix, turned into a recording of the reference of `case`.

    It is cut to the steps of `case`, and its manifest names `case`. Passes cannot change the bits of a reference
    without a graph, so a new run would record the same. Raises RecordingError for a reference with a graph.
    """
    manifest = recording.manifest
    if manifest.graph is not None:
        raise RecordingError("a reference that has passes must be recorded for each prefix", found=manifest.system)
    recording = recording.first_steps(case.steps)
    values = {name: value for name, value in recording.manifest.case.items() if name != "pipeline"}
    pipeline = {name: value for name, value in manifest.case.get("pipeline", {}).items() if name != "until"}
    # A case of a user's systems states no default.
    stated = case.stated().get("pipeline", {})
    pipeline |= {"until": stated["until"]} if "until" in stated else {}
    return recording.told_as(replace(recording.manifest, case=values | ({"pipeline": pipeline} if pipeline else {})))
