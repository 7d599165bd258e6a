"""Run a case: record the reference and the candidate, compare the recordings, then apply each check in order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import PREPARED, Case, with_plan
from bitproof.harness.checks.power_modules import power_module
from bitproof.harness.compare.bits import ComparedBits
from bitproof.harness.compare.outcome import result_of, result_of_error
from bitproof.harness.compare.part_layouts import have_different_layouts
from bitproof.harness.compare.verdict import Judgement, Repeat, compare, judgement_of
from bitproof.harness.errors import BitproofError, RankError, UsageError
from bitproof.harness.execute.checks.case_checks import DECIDING, REPORTING, applied
from bitproof.harness.execute.folders import CaseFolders
from bitproof.harness.execute.precompiled import PrecompiledStep
from bitproof.harness.execute.requests import (
    BitsRequest,
    PlaceRequest,
    Request,
    RunAnswer,
    RunRequest,
)
from bitproof.harness.execute.save_and_resume import Resume
from bitproof.harness.execute.session import Client
from bitproof.harness.execute.status_messages import PreparedGraph
from bitproof.harness.localize.logs.replay import LoggedStep, Replay, archive_of, archives_of
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import ROLES, OnEvent, Role, RunOptions
from bitproof.harness.records import (
    CaseResult,
    CaseSeconds,
    Comparison,
    Event,
    Partition,
    Placed,
    Recording,
    Throughput,
    Verdict,
)
from bitproof.harness.records.layout import Across, Recorded
from bitproof.harness.systems.registry import sums_over_ranks
from bitproof.harness.systems.revisions import check_out

if TYPE_CHECKING:
    from bitproof.harness.localize.every_call import EveryCall

# The host watches a run's time itself and reports more about it, so it gets this much longer.
_HOST_MARGIN = 15.0

A = TypeVar("A")


class CaseRun:
    """Runs a case: each of its systems once (the "first" run), and again if a check or a search needs it.

    A `role` is "reference" or "candidate". An `arm` is the purpose of a run:

    - "first"
    - "control": a repetition with the same settings
    - "stress": a repetition with random sleeps
    - "replay1", "replay2", ...: repetitions for the search for the cause of a difference

    The checks of `checks/case_checks.py` read these attributes:

    - `comparison`: the comparison of the first run of the reference with that of the candidate.
    - `across`: the comparison of systems whose tensors have different layouts; None if the layouts are alike.
    - `repeats`: for each repetition, its comparison with the first run of the same system.
    - `races`: lines about races in the systems' graphs, as the keys of a dict.
    """

    case: Case
    options: RunOptions
    comparison: Comparison

    def __init__(
        self,
        case: Case,
        placement: Placement,
        client: Client,
        options: RunOptions,
        on_event: OnEvent,
        *,
        logs_calls: bool = False,
    ) -> None:
        """Create the object without running anything. With `logs_calls`, the first runs also log the operator calls of
        step 0.

        A difference can then be traced to a call without a replay. But the report cannot show the bits of the values
        that differ.
        """
        self.case = case
        self.placement = placement
        self.client = client
        self.folders = CaseFolders(case, client.run_dir, client.work)
        self.options = options
        self._limit = options.timeout
        self.deadline = time.monotonic() + self._limit
        self.seconds = CaseSeconds(trace=0.0, passes={}, reference=0.0, candidate=0.0, compare=0.0)
        self.memory: dict[str, float | None] = {}
        self.throughput: dict[Role, Throughput] = {}
        self.graph: PreparedGraph | None = None
        self.races: dict[str, None] = {}
        self._step = PrecompiledStep(case, options, placement, client)
        self.placed: Placed | None = None
        self.remarks = self.folders.remarks_on_graphs() if options.dump_graphs else []
        self.firsts: dict[Role, Recording] = {}
        self.across: Any = None
        self.repeats: list[Repeat] = []
        self._logged = dict[tuple[Role, int], list[Path]]()
        # Fewer if second runs may end with the first difference; see `checks/second_runs.py`.
        self.control_steps = case.steps
        self._on_event = on_event
        self.every_call: EveryCall | None = None
        # By arm, the step whose calls a run also logs. `checks/second_runs.py` may add the arm `control`.
        self.watches: dict[str, Replay] = {"first": Replay(step=0, log=True)} if logs_calls else {}
        self.shows_bits = not logs_calls

    def result(self) -> CaseResult:
        """Run the case and return its result. A BitproofError becomes part of the result instead of being raised."""
        where = {name: getattr(self.placement, name) for name in ("device", "backend", "collectives")}
        began = time.monotonic()
        try:
            self._place()
            self._step.check(self._remaining(), self._on_event)
            judgement = self._judged()
        except BitproofError as error:
            self.seconds.total = time.monotonic() - began
            result = result_of_error(self.case, error, **where, **self._measured(), remarks=tuple(self.remarks))
        else:
            self.seconds.total = time.monotonic() - began
            # A candidate that continues from the reference's checkpoint lacks the steps before, so none are shown.
            losses = {role: self.firsts[role].from_step(self.case.first_step).losses() for role in ROLES}
            judgement = replace(judgement, remarks=(*judgement.remarks, *self.remarks))
            result = result_of(self.case, judgement, **where, losses=losses, **self._measured())
        return applied(REPORTING, result, self)

    def _judged(self) -> Judgement:
        for role in ROLES if self.options.profile else ():
            self.folders.profile(role).mkdir(parents=True, exist_ok=True)
        # The next request is known already: its graph may be traced while the reference's ranks run.
        self._note("reference", self.record("reference", "first", later=self._request("candidate", "first")))
        self._read_first("reference")  # before a candidate runs that could rewrite it
        # While a graph is traced on another core, the reference's second run costs no time.
        is_prefetch = self.case.candidate in PREPARED and self.case.reference not in PREPARED
        if is_prefetch and self.options.control == "always":
            self.repeats.append(Repeat("reference", False, self.repeat("control", "reference")))
        self._note("candidate", self.record("candidate", "first"))
        if self.options.profile:
            from bitproof.harness.execute.instruments.profile import join_profiles

            join_profiles(self.folders.profiles(), self.folders.joined_profile())
        self._on_event(Event(event="compare", case=self.case.name))
        return applied(DECIDING, self._compared(), self)

    def _compared(self) -> Judgement:
        began = time.monotonic()
        reference, candidate = (self._read_first(role) for role in ROLES)
        if self.case.bound is not None or not have_different_layouts(self.case, reference, candidate):
            self.comparison = compare(reference, candidate, self.case)
            judgement = judgement_of(self.comparison)
        else:
            # The layouts differ and the case states no bound, so a bound is found for each tensor.
            across = power_module("two_layouts.across")
            self.across = across.compare_layouts(self.case, self.firsts, self._record_across, read_recording, self.ask)
            self.comparison = self.across.comparison
            # Comparing layouts has run both systems a second time, so `control` need not run them again.
            self.repeats = [Repeat(role, False, found) for role, found in self.across.controls.items()]
            judgement = replace(judgement_of(self.comparison), layouts=self.across.layouts)
        self.seconds.compare = time.monotonic() - began
        return judgement

    @property
    def has_partners(self) -> bool:
        """Whether calls of the candidate can be matched with calls of the reference. The search for a cause requires
        this.
        """
        return self.across is None or bool(self.across.have_partners)

    @property
    def runs_twice(self) -> bool:
        """Whether the option `control` requires a second run of each system.

        "always" and "logged" require it, and "never" does not. With any other value, a second run is required only if
        the first runs differ.
        """
        control, differs = self.options.control, self.comparison.verdict == Verdict.DIFFERENT
        return control in ("always", "logged") or (control != "never" and differs)

    def record(
        self,
        role: Role,
        arm: str,
        *,
        out: Path | None = None,
        replay: Replay | None = None,
        later: RunRequest | None = None,
    ) -> RunAnswer:
        """Run a role's system once, write its recording, and return the host process's answer.

        - `out`: the folder for the recording; by default, the usual folder for the role and the arm.
        - `later`: the request of the next run, so that its graph can be traced while this run takes its steps.
        """
        self._place()
        return self._run(replace(self._request(role, arm, out, replay), later=later))

    def run_again(self, role: Role, arm: str) -> Path:
        self._limit = self.options.timeout
        self.deadline = time.monotonic() + self._limit
        self.record(role, arm)
        return self.folders.recording(role, arm)

    def recording(self, role: Role) -> Recording:
        """Return the recording of a role's first run. Raises RecordingError if it is missing."""
        return read_recording(self.folders.recording(role, "first"))

    def recordings(self) -> dict[Role, Path]:
        return {role: self.folders.recording(role, "first") for role in ROLES}

    def log_calls(self, role: Role, step: int) -> list[Path]:
        """Run a role's system again, and log all operator calls of step `step`. Returns the log files, in rank order.

        Steps count from 0. The run has a new time limit. If these calls are logged already, nothing runs. Raises
        UsageError for a step that the case does not have.
        """
        if not 0 <= step < self.case.steps:
            raise UsageError(
                f"case {self.case.name} has no step {step}, so its calls cannot be logged",
                expected=f"a step from 0 to {self.case.steps - 1}",
            )
        # Several checks may ask for the same calls.
        if (role, step) not in self._logged:
            self.begin_explaining()
            folder = self.archives / f"{role}.calls.{step}"
            self.record(role, "replay1", out=folder, replay=Replay(step=step, log=True))
            ranks = range(self.case.parallelism.world_size)
            self._logged[role, step] = [archive_of(folder, rank) for rank in ranks]
        return self._logged[role, step]

    def _request(self, role: Role, arm: str, out: Path | None = None, replay: Replay | None = None) -> RunRequest:
        system, case, suffix = getattr(self.case, role), self.case.of(role), "" if arm == "first" else f".{arm}"
        chosen = self.options.of_run(role, is_stressed=arm == "stress" or bool(replay and replay.stressed))
        at, work = case.resume_at, self.client.work / f"{self.case.name}-{role}{suffix}"
        # A script of a git revision is written to disk before any rank needs it.
        check_out(system, work.parent)
        return RunRequest(
            case=replace(case, steps=self.control_steps) if arm == "control" else case,
            system=system,
            arm=arm,
            placement=self.placement,
            out=(out or self.folders.recording(role, arm)).resolve(),
            logs=self.folders.logs(role),
            work=work,
            timeout=self._remaining(),
            case_timeout=self._limit,
            options=replace(chosen, values=self._values(system)),
            replay=replay,
            resume=Resume(at=at, folder=str(work / "saved")) if role == "candidate" and at is not None else None,
            watch=LoggedStep(replay=self.watches[arm], folder=archives_of(self.archives.resolve(), role))
            if arm in self.watches
            else None,
            dump_dir=self.folders.graphs(role) if self.options.dump_graphs and arm == "first" else None,
            profile=self.folders.profile(role) if self.options.profile and arm == "first" else None,
            precompiled=self._step.folder_for(role, self._remaining(), self._on_event),
        )

    def _values(self, system: str) -> tuple[str, ...]:
        # For example, a drift from a baseline is measured in ULPs, which needs the values of the baseline's tensors.
        kept = (check.values(self.case, system) for check in self.options.active)
        return self.options.values + tuple(itertools.chain.from_iterable(kept))

    def _run(self, request: RunRequest) -> RunAnswer:
        def on_event(event: Event) -> None:
            # The host sends only what happened: the case, the system and the arm are added here.
            self._on_event(replace(event, case=self.case.name, system=request.system, arm=request.arm))

        return self.client.ask(request, self._remaining() + _HOST_MARGIN, on_event)

    def ask(self, request: Request[A]) -> A:
        """Send a request to the host process and return the answer. For any request other than a run, such as a
        BitsRequest.

        The time limit is the remaining time of the case.
        """
        return self.client.ask(request, self._remaining() + _HOST_MARGIN, self._on_event)

    def _place(self) -> None:
        if self.case.autoplace is not None and self.case.autoplace.plan is None:
            logs, timeout = self.folders.logs("candidate"), self._remaining()
            # Both systems must use the same placements, so the plan becomes a part of the case before either runs.
            found = self.ask(PlaceRequest(case=self.case, logs=logs, timeout=timeout))
            self.case, self.placed = with_plan(self.case, found.plan), found.placed

    def compare_bits(self, archives: Mapping[Role, Path], name: str) -> ComparedBits:
        """Compare a value of the reference, called `name`, bit by bit with the candidate's value of this name.

        `archives` has each role's file with logged values.
        """
        return self.ask(BitsRequest(reference=archives["reference"], candidate=archives["candidate"], name=name))

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _record_across(self, role: Role, arm: str, across: Across) -> Recorded:
        answer = self._run(replace(self._request(role, arm), across=across))
        return Recorded(self.folders.recording(role, arm).resolve(), answer.narrow)

    def repeat(self, arm: Literal["control", "stress"], role: Role) -> Comparison:
        """Run a role's system once more, and compare the new recording with the recording of the first run."""
        began = time.monotonic()
        self.record(role, arm)
        first, case = self._read_first(role), self.case
        # A shortened control is compared with as many first steps.
        if arm == "control" and self.control_steps < case.steps:
            case = replace(case, steps=self.control_steps)
            first = first.first_steps(case.steps)
        found = compare(first, read_recording(self.folders.recording(role, arm)), case.of(role))
        self.seconds.note(arm, role, time.monotonic() - began)
        return found

    def _read_first(self, role: Role) -> Recording:
        if role not in self.firsts:
            self.firsts[role] = self.recording(role)
        return self.firsts[role]

    @property
    def archives(self) -> Path:
        return self.client.work / self.case.name

    def begin_explaining(self) -> None:
        """Start the time limit `explain_timeout`, for the search for a cause and for the second runs that the search
        uses."""
        self._limit = self.options.explain_timeout
        self.deadline = time.monotonic() + self._limit

    def replay(self, role: Role, number: int, folder: Path, replay: Replay) -> str | None:
        """Run a role's system again for a search, as replay number `number`, and write the logged calls or values into
        `folder`.

        Returns the digest of the value that the replay keeps; None if it keeps none. Raises RankError if the replay
        fails or time is up.
        """
        try:
            return self.record(role, f"replay{number}", out=folder, replay=replay).kept
        except RankError as error:
            # Out of time, the host's error would name --timeout, but this search has a limit of its own.
            if self._remaining() > 0:
                raise
            took, fix = f"finding the cause took longer than {self._limit:g} s", "give a longer --explain-timeout"
            raise RankError(took, found=error.what, where=error.where, fix=fix) from error

    def _note(self, role: Role, answer: RunAnswer) -> None:
        setattr(self.seconds, role, answer.seconds.steps)
        self.memory[role] = answer.peak_mib
        if answer.throughput is not None:
            self.throughput[role] = answer.throughput
        if changed := answer.switches_changed:
            system = getattr(self.case, role)
            self.remarks.append(f"{role} {system} changed switches that bitproof had set: {', '.join(changed)}")
        self.seconds.note("start_ranks", role, answer.seconds.start_ranks)
        self.seconds.note("record", role, answer.seconds.record)
        # Several runs show the same race, which is listed once.
        self.races |= dict.fromkeys(answer.races)
        if graph := answer.graph:
            # If both systems have graphs, their times are added. The report shows the candidate's graph, which is last.
            self.seconds.trace = (self.seconds.trace or 0.0) + graph.trace_seconds
            self.seconds.passes = (self.seconds.passes or {}) | {entry.name: entry.seconds for entry in graph.passes}
            self.graph = graph
            self.remarks += [graph.artifact.describe(role)] if graph.artifact else []
            self.remarks += [f"{role} {getattr(self.case, role)}: {each}" for each in graph.compiled]

    def _measured(self) -> dict[str, Any]:
        passes = self.graph.passes if self.graph else []
        return {
            "seconds": self.seconds,
            "memory": self.memory,
            "throughput": self.throughput,
            "passes": passes,
            "kept_graph": self.graph.was_kept if self.graph else None,
            "artifact": self.graph.artifact if self.graph else None,
            "partition": Partition.of([entry.facts for entry in passes]),
            "placed": self.placed,
            "sums_over_ranks": sums_over_ranks({role: first.manifest for role, first in self.firsts.items()}),
            "logs": self.folders.log_files(),
        }
