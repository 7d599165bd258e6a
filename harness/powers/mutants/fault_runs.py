"""Injects faults into a case, one after the other, and judges each.

1. Run the reference, and the candidate without a fault. Both must agree; otherwise, a difference could not be
   attributed to a fault.
2. For each fault, run the candidate's first step with the fault, log every call, and compare the step with the
   reference. If the step does not differ, run all steps.
3. If a later step is the first that differs, repeat this step, and log every call.
4. Search for the cause, and verify it by exchanging values, as for any difference of a case.
5. Compare the blamed call with the calls that the fault changed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import Case
from bitproof.harness.compare.order import place_of
from bitproof.harness.compare.verdict import compare, demand_substance
from bitproof.harness.disturb.faults import Entry, Site
from bitproof.harness.errors import BitproofError, RankError, UsageError
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.requests import RunAnswer
from bitproof.harness.execute.session import Client
from bitproof.harness.localize.logs.replay import SPARE_BYTES, Replay, archives_of
from bitproof.harness.localize.search import Search, held_as
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import OnEvent, RunOptions
from bitproof.harness.processes.process import cpu_of_descendants
from bitproof.harness.records import (
    CaseResult,
    Comparison,
    Divergence,
    FaultOutcome,
    FaultStatus,
    Key,
    Recording,
    Verdict,
)


def shows_faults(result: CaseResult) -> bool:
    """Return whether a case has, without a fault, the verdict that is needed to detect faults.

    It must be EQUAL, or CLOSE if that is the expected verdict, as for systems with different layouts.
    """
    return result.verdict == Verdict.EQUAL or (result.verdict == Verdict.CLOSE and result.as_expected)


MAX_REASON = 600
"""The maximum number of characters of an error in an outcome."""


class FaultRuns:
    """Runs a case repeatedly, each time with another fault injected into its candidate."""

    def __init__(
        self, case: Case, placement: Placement, client: Client, options: RunOptions, on_event: OnEvent
    ) -> None:
        self.case = case
        self._placement = placement
        self._client = client
        self._options = replace(options, control="never", inject=None)
        self._on_event = on_event
        self._reference: Recording | None = None
        self._is_clean_when_logged: bool | None = None
        self._references: dict[int, Path] = {}
        self.cpu_seconds = 0.0
        """CPU seconds so far, on all cores, including this process."""

    def begin(self) -> CaseResult:
        """Run and judge the case without a fault. If `shows_faults(result)` is False, no fault can be detected."""
        with self._counting():
            return self._begin()

    def _begin(self) -> CaseResult:
        run = CaseRun(self.case, self._placement, self._client, self._options, self._on_event)
        result = run.result()
        self.case = run.case  # includes solved placements, as in the recordings
        if shows_faults(result):
            self._reference = run.recording("reference")
        return result

    def outcome(self, entry: Entry) -> FaultOutcome:
        """Run the case with a fault, and return whether the fault was detected and blamed correctly, and the time."""
        began, cpu = time.monotonic(), self.cpu_seconds
        with self._counting():
            outcome = self._outcome(entry)
            # Recordings of hundreds of faults would fill the disk.
            shutil.rmtree(self._folder, ignore_errors=True)
        return replace(outcome, seconds=time.monotonic() - began, cpu_seconds=self.cpu_seconds - cpu)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        began, own = cpu_of_descendants(), time.process_time()
        try:
            yield
        finally:
            # Never negative: a process that has ended may be missing in the second sum.
            self.cpu_seconds += max(0.0, cpu_of_descendants() - began) + time.process_time() - own

    def _outcome(self, entry: Entry) -> FaultOutcome:
        assert self._reference is not None, "begin comes first"
        blank = FaultOutcome(
            fault=entry.name,
            family=entry.family,
            is_fault=entry.is_fault,
            says=entry.says,
            source=entry.source,
            case=self.case.name,
            ranks=self.case.parallelism.world_size,
            steps=self.case.steps,
            status="unjudged",
        )
        if unmet := entry.unmet(self.case):
            return replace(blank, status="not struck", reason=f"it needs {'; '.join(unmet)}")
        # Between two layouts, or with a candidate that resumes, a verdict takes more than one run of a system.
        if self.case.reference_parallelism is not None or self.case.resume_at is not None:
            return self._outcome_of_case(blank, entry)
        # A harmless rewrite must agree in all steps, so these always run.
        if entry.is_fault and (outcome := self._outcome_of_first_step(blank, entry)):
            return outcome
        run = self._run_with(entry)
        try:
            answer = run.record("candidate", entry.name, out=self._folder / "recording")
        except RankError as error:
            # A rank reports a fault that did not fire as an error: that is no detection.
            if "never fired" in str(error):
                return replace(blank, status="not struck", reason=_shortened(error))
            status: FaultStatus = "killed" if entry.is_fault else "flagged"
            return replace(blank, status=status, verdict=Verdict.ERROR, reason=_shortened(error))
        except UsageError as error:
            return replace(blank, status="not struck", reason=_shortened(error))
        except BitproofError as error:
            return replace(blank, reason=_shortened(error))
        candidate = read_recording(self._folder / "recording")
        comparison = demand_substance(compare(self._reference, candidate, self.case))
        return self._judged(blank, entry, comparison, candidate, _sites(entry, answer))

    def _outcome_of_case(self, blank: FaultOutcome, entry: Entry) -> FaultOutcome:
        result = self._run_with(entry).result()
        first, statuses = result.first_divergence, {Verdict.DIFFERENT: "killed", Verdict.ERROR: "killed"}
        # A CLOSE result is within its bound, so the fault did not show.
        statuses |= dict.fromkeys((Verdict.EQUAL, Verdict.CLOSE), "survived")
        status = cast(FaultStatus, statuses.get(result.verdict, "unjudged"))
        reason = None if result.error is None or status == "survived" else result.error[:MAX_REASON]
        outcome = replace(blank, status=status, verdict=result.verdict, kinds=result.differing_kinds, reason=reason)
        outcome = replace(outcome, expected=tuple(map(_describe_site, entry.sites)))
        if result.verdict != Verdict.DIFFERENT or first is None:
            return outcome
        key = Key(first.step, first.kind, first.name, first.rank)
        at = f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"
        return _with_blame_checked(
            replace(outcome, first=at, call=first.call), entry, first, list(entry.sites), place_of(key)
        )

    def _outcome_of_first_step(self, blank: FaultOutcome, entry: Entry) -> FaultOutcome | None:
        """Run only the first step with a fault. Return the outcome, or None if all steps must run.

        All steps must run if the fault does not change the first step. `blank` is the outcome before any run.
        """
        if not self._is_clean_when_logged_too():
            return None
        try:
            answer, candidate = self._logged_first_step(replace(self._options, inject=entry.name), entry.name)
        except BitproofError:
            # An error here is judged by the run of all steps, which then follows.
            return None
        comparison = self._compared_first_step(candidate)
        if comparison.verdict != Verdict.DIFFERENT:
            return None
        return self._judged(blank, entry, comparison, candidate, _sites(entry, answer), is_logged=True)

    def _is_clean_when_logged_too(self) -> bool:
        if self._is_clean_when_logged is None:
            try:
                _, candidate = self._logged_first_step(self._options, "logged")
                self._is_clean_when_logged = self._compared_first_step(candidate).verdict == Verdict.EQUAL
            except BitproofError:
                self._is_clean_when_logged = False
        return self._is_clean_when_logged

    def _logged_first_step(self, options: RunOptions, arm: str) -> tuple[RunAnswer, Recording]:
        """Run the candidate's first step, and log its calls where a search expects them."""
        run = CaseRun(replace(self.case, steps=1), self._placement, self._client, options, self._on_event)
        run.watches[arm] = self._logged(0)
        answer = run.record("candidate", arm, out=self._folder / "first-step")
        archives = archives_of(self._folder, "candidate")
        shutil.rmtree(archives, ignore_errors=True)
        shutil.move(archives_of(run.archives, "candidate"), archives)
        return answer, read_recording(self._folder / "first-step")

    def _compared_first_step(self, candidate: Recording) -> Comparison:
        assert self._reference is not None, "begin comes first"
        return compare(self._reference.first_steps(1), candidate, replace(self.case, steps=1))

    def _judged(
        self,
        blank: FaultOutcome,
        entry: Entry,
        comparison: Comparison,
        candidate: Recording,
        sites: list[Site],
        *,
        is_logged: bool = False,
    ) -> FaultOutcome:
        """Return a copy of `blank`, the outcome of a fault before any run, with the findings of `comparison`.

        - `sites`: the calls that the fault changed.
        - `is_logged`: whether the candidate's first differing step is logged. If not, that step is run again.
        """
        first = comparison.first_divergence
        seen = comparison.verdict == Verdict.DIFFERENT
        # A run that cannot be compared, e.g. one with missing records, stays "unjudged".
        if comparison.verdict not in (Verdict.DIFFERENT, Verdict.EQUAL):
            return replace(blank, verdict=comparison.verdict, reason=comparison.reason)
        # By whether the entry is a fault; an equivalent rewrite must not differ.
        named: dict[bool, FaultStatus] = {True: "killed" if seen else "survived", False: "flagged" if seen else "equal"}
        outcome = replace(
            blank,
            status=named[entry.is_fault],
            verdict=comparison.verdict,
            kinds=comparison.differing_kinds,
            expected=tuple(map(_describe_site, sites)),
        )
        if first is None:
            hidden = entry.hidden(self.case)
            reason = f"this case cannot see it: it needs {'; '.join(hidden)}" if hidden and entry.is_fault else None
            return replace(outcome, reason=reason)
        key = Key(first.step, first.kind, first.name, first.rank)
        assert self._reference is not None
        outcome = replace(
            outcome,
            first=f"step {first.step}, rank {first.rank}, {first.kind} {first.name}",
            holds=held_as(self._reference, candidate, key),
        )
        try:
            outcome = replace(outcome, call=self._explained(entry, first, candidate, is_logged=is_logged).call)
        except BitproofError as error:
            outcome = replace(outcome, reason=f"the replay that looks for the cause failed: {_shortened(error)}")
        return _with_blame_checked(outcome, entry, first, sites) if entry.is_fault else outcome

    def _explained(self, entry: Entry, first: Divergence, candidate: Recording, *, is_logged: bool) -> Divergence:
        """Return the difference `first` of a run with a fault, with the call to blame."""
        assert self._reference is not None
        run = self._run_with(entry)
        run.begin_explaining()
        # The reference has no fault, so a single log of each step serves all faults.
        if first.step not in self._references:
            folder = self._client.work / f"{self.case.name}-reference-{first.step}"
            self._clean_run().record("reference", "replay1", out=folder, replay=self._logged(first.step))
            self._references[first.step] = folder
        known = archives_of(self._folder, "reference")
        shutil.copytree(self._references[first.step], known, copy_function=os.link)
        if not is_logged:
            archives = archives_of(self._folder, "candidate")
            # The first step's log is of a step that does not differ.
            shutil.rmtree(archives, ignore_errors=True)
            run.record("candidate", "replay1", out=archives, replay=self._logged(first.step))
        search = Search(
            {"reference": self._reference, "candidate": candidate},
            self._folder,
            self.case.parallelism.world_size,
            run.replay,
            run.compare_bits,
            is_logged=True,
            shows_bits=False,
            verifies=self._options.verify,
        )
        return search.explain(first)

    def _logged(self, step: int) -> Replay:
        """Return the request for a run that logs the calls of `step`, with outputs to exchange."""
        return Replay(step=step, log=True, spare=SPARE_BYTES if self._options.verify else 0)

    def _clean_run(self) -> CaseRun:
        return CaseRun(self.case, self._placement, self._client, self._options, self._on_event)

    def _run_with(self, entry: Entry) -> CaseRun:
        options = replace(self._options, inject=entry.name)
        return CaseRun(self.case, self._placement, self._client, options, self._on_event)

    @property
    def _folder(self) -> Path:
        return self._client.work / f"{self.case.name}-fault"


def _sites(entry: Entry, answer: RunAnswer) -> list[Site]:
    # A fault's edit of the graph reports the calls that it changed. Otherwise they are those of its catalogue entry.
    passes = answer.graph.passes if answer.graph else []
    reported = next((report.facts["sites"] for report in passes if report.name == f"fault {entry.name}"), None)
    return [Site(*site) for site in reported] if reported is not None else list(entry.sites)


def _with_blame_checked(
    outcome: FaultOutcome, entry: Entry, first: Divergence, sites: list[Site], place: tuple[str, str] | None = None
) -> FaultOutcome:
    """Return a copy of `outcome` that states whether module, operator and rank of the blamed call are right.

    - Module and operator are right if a call in `sites`, the calls that the fault changed, has the same ones.
    - The rank is right if it is the rank of the fault.

    If no call is blamed, `place` is checked instead: (module, direction).
    """
    call, rank = outcome.call, entry.rank_of(outcome.ranks)
    # An observed activation may differ before the kinds that the row names.
    outcome = replace(outcome, kind_right=first.kind in ("activation", *entry.kinds))
    if not sites:  # no operator call is wrong
        return outcome
    if call is None and place is not None:
        return replace(outcome, place_right=any(site.is_at(*place) for site in sites))
    if call is None:
        return replace(outcome, place_right=False, operator_right=False, rank_right=None if rank is None else False)
    return replace(
        outcome,
        place_right=any(site.is_at(call.module, call.direction) for site in sites),
        operator_right=any(site.is_at(call.module, call.direction) and site.is_of(call.operator) for site in sites),
        # None for a fault on all ranks, where no rank is the right one.
        rank_right=None if rank is None else call.rank == rank,
    )


def _describe_site(site: Site) -> str:
    module = "no module" if site.module is None else site.module or "the root"
    chunk = "" if site.chunk is None else f", chunk {site.chunk}"
    return f"{site.operator} of {module} ({site.direction}{chunk})"


def _shortened(error: BitproofError) -> str:
    # Errors of gloo and pydantic begin with the essential part, and may be very long.
    text = str(error)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
