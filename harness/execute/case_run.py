"""A case from its first run to its result: record both systems, compare, run both again, judge, explain."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import PREPARED, Case, with_plan
from bitproof.harness.compare.baselines import values_to_keep
from bitproof.harness.compare.bits import ComparedBits
from bitproof.harness.compare.outcome import result_of, result_of_error
from bitproof.harness.compare.relaid import are_laid_out_otherwise
from bitproof.harness.compare.verdict import Judgement, compare, judge, races_beside, repeats
from bitproof.harness.disturb.regroup import Across
from bitproof.harness.errors import BitproofError, RankError
from bitproof.harness.execute.across import AcrossLayouts, Recorded, compare_layouts
from bitproof.harness.execute.find_cause import Explainer
from bitproof.harness.execute.folders import CaseFolders
from bitproof.harness.execute.instruments.profile import join_profiles
from bitproof.harness.execute.precompiled import PrecompiledStep
from bitproof.harness.execute.requests import (
    BitsRequest,
    ClosenessRequest,
    PlaceRequest,
    Request,
    RunAnswer,
    RunRequest,
)
from bitproof.harness.execute.session import Client
from bitproof.harness.execute.status_messages import PreparedGraph
from bitproof.harness.execute.two_halves import Resume
from bitproof.harness.localize.logs.replay import SPARE_BYTES, LoggedStep, Replay, archive_of, archives_of
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import LOGS_STEP, ROLES, OnEvent, Role, RunOptions
from bitproof.harness.records import (
    CaseResult,
    CaseSeconds,
    Closeness,
    Comparison,
    Event,
    Key,
    Partition,
    Placed,
    Recording,
    Throughput,
    Verdict,
)
from bitproof.harness.systems.registry import sums_over_ranks
from bitproof.harness.systems.revisions import check_out

if TYPE_CHECKING:
    from bitproof.harness.localize.every_call import EveryCall

# The host watches a run's time itself and reports more about it, so it gets this much longer.
_HOST_MARGIN = 15.0

A = TypeVar("A")


class CaseRun:
    """A case from its first run to its result."""

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
        """With `logs_calls` first runs log the calls of step 0. A difference is then traced to a call without a replay,
        and the report shows no bits of the differing values."""
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
        self._firsts: dict[Role, Recording] = {}
        self._control_steps = case.steps
        self._on_event = on_event
        self.every_call: EveryCall | None = None
        self._watches: dict[str, Replay] = {"first": Replay(step=0, log=True)} if logs_calls else {}
        self._shows_bits = not logs_calls

    def result(self) -> CaseResult:
        """Run the case. Any error in it becomes its result."""
        where = {name: getattr(self.placement, name) for name in ("device", "backend", "collectives")}
        began = time.monotonic()
        try:
            self._place()
            self._step.check(self._remaining(), self._on_event)
            judgement, recordings = self._judge()
        except BitproofError as error:
            self.seconds.total = time.monotonic() - began
            return result_of_error(self.case, error, **where, **self._measured(), remarks=tuple(self.remarks))
        self.seconds.total = time.monotonic() - began
        losses = {role: each.from_step(self.case.first_step).losses() for role, each in recordings.items()}
        judgement = replace(judgement, remarks=(*judgement.remarks, *self.remarks))
        return result_of(self.case, judgement, **where, losses=losses, **self._measured())

    def record(
        self,
        role: Role,
        arm: str,
        *,
        out: Path | None = None,
        replay: Replay | None = None,
        later: RunRequest | None = None,
    ) -> RunAnswer:
        """Run one system once, recorded or replayed at `out`; returns the host's answer."""
        self._place()
        return self._run(replace(self._request(role, arm, out, replay), later=later))

    def run_again(self, role: Role, arm: str) -> Path:
        """Run a side once more, with a new time limit; returns the folder of the recording."""
        self._limit = self.options.timeout
        self.deadline = time.monotonic() + self._limit
        self.record(role, arm)
        return self.folders.recording(role, arm)

    def recording(self, role: Role) -> Recording:
        """The recording of a side's first run. Raises RecordingError if it is missing."""
        return read_recording(self.folders.recording(role, "first"))

    def recordings(self) -> dict[Role, Path]:
        """Each side's folder for the recording of its first run."""
        return {role: self.folders.recording(role, "first") for role in ROLES}

    def log_calls(self, role: Role, step: int) -> list[Path]:
        """Replay a side, with a time limit of its own, and log the calls of a step. Returns an archive per rank."""
        self._begin_explaining()
        folder = self._archives / f"{role}.calls"
        self.record(role, "replay1", out=folder, replay=Replay(step=step, log=True))
        return [archive_of(folder, rank) for rank in range(self.case.parallelism.world_size)]

    def _request(self, role: Role, arm: str, out: Path | None = None, replay: Replay | None = None) -> RunRequest:
        system, case, suffix = getattr(self.case, role), self.case.of(role), "" if arm == "first" else f".{arm}"
        chosen = self.options.of_run(role, is_stressed=arm == "stress" or bool(replay and replay.stressed))
        of_baseline = values_to_keep(self.options.baseline_dir, self.case, system)
        at, work = case.resume_at, self.client.work / f"{self.case.name}-{role}{suffix}"
        # A script of a git revision is written to disk before any rank needs it.
        check_out(system, work.parent)
        return RunRequest(
            case=replace(case, steps=self._control_steps) if arm == "control" else case,
            system=system,
            arm=arm,
            placement=self.placement,
            out=(out or self.folders.recording(role, arm)).resolve(),
            logs=self.folders.logs(role),
            work=work,
            timeout=self._remaining(),
            case_timeout=self._limit,
            options=replace(chosen, values=self.options.values + of_baseline),
            replay=replay,
            resume=Resume(at=at, folder=str(work / "saved")) if role == "candidate" and at is not None else None,
            watch=LoggedStep(replay=self._watches[arm], folder=archives_of(self._archives.resolve(), role))
            if arm in self._watches
            else None,
            dump_dir=self.folders.graphs(role) if self.options.dump_graphs and arm == "first" else None,
            profile=self.folders.profile(role) if self.options.profile and arm == "first" else None,
            precompiled=self._step.folder_for(role, self._remaining(), self._on_event),
        )

    def _run(self, request: RunRequest) -> RunAnswer:
        """Run a system within the case's time; events name their case and system."""

        def on_event(event: Event) -> None:
            self._on_event(replace(event, case=self.case.name, system=request.system, arm=request.arm))

        return self.client.ask(request, self._remaining() + _HOST_MARGIN, on_event)

    def _ask(self, request: Request[A]) -> A:
        """Send the client a request that is not a run, with the rest of the case's time limit."""
        return self.client.ask(request, self._remaining() + _HOST_MARGIN, self._on_event)

    def _place(self) -> None:
        """Solve for placements if the case requests that and has no plan yet."""
        if self.case.autoplace is not None and self.case.autoplace.plan is None:
            logs, timeout = self.folders.logs("candidate"), self._remaining()
            found = self._ask(PlaceRequest(case=self.case, logs=logs, timeout=timeout))
            self.case, self.placed = with_plan(self.case, found.plan), found.placed

    def _compare_bits(self, archives: Mapping[Role, Path], name: str) -> ComparedBits:
        return self._ask(BitsRequest(reference=archives["reference"], candidate=archives["candidate"], name=name))

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _judge(self) -> tuple[Judgement, dict[Role, Recording]]:
        for role in ROLES if self.options.profile else ():
            self.folders.profile(role).mkdir(parents=True, exist_ok=True)
        self._note("reference", self.record("reference", "first", later=self._request("candidate", "first")))
        self._read_first("reference")  # before a candidate runs that could rewrite it
        # While a graph is traced on another core, the reference's second run costs no time.
        control = self.options.control
        is_prefetch = control == "always" and self.case.candidate in PREPARED and self.case.reference not in PREPARED
        controls: dict[Role, Comparison | None] = dict.fromkeys(ROLES)
        if is_prefetch:
            controls["reference"] = self._repeat("control", "reference")
        self._note("candidate", self.record("candidate", "first"))
        if self.options.profile:
            join_profiles(self.folders.profiles(), self.folders.joined_profile())
        self._on_event(Event(event="compare", case=self.case.name))
        began = time.monotonic()
        recordings = {role: self._read_first(role) for role in ROLES}
        across, here, there = self._across(recordings), recordings["reference"], recordings["candidate"]
        comparison = across.comparison if across else compare(here, there, self.case)
        self.seconds.compare = time.monotonic() - began
        closeness = self._measure(comparison) if self._is_measurable(comparison) else None
        controls |= across.controls if across else {}
        # A side that differs from itself is NONDETERMINISTIC, not DIFFERENT, so both sides run again.
        runs_twice = control in ("always", "logged") or (control != "never" and comparison.verdict == Verdict.DIFFERENT)
        self._control_steps = self._steps_of_control(comparison)
        if runs_twice and control in LOGS_STEP and not self._watches and (first := comparison.first_divergence):
            self._begin_explaining()
            key = Key(first.step, first.kind, first.name, first.rank)  # with its values kept, a search replays nothing
            self._watches["control"] = Replay(step=first.step, log=True, record=key, spare=SPARE_BYTES)
        for role in ROLES if runs_twice else ():
            controls[role] = controls[role] or self._control(role)
        stresses = {role: self._repeat("stress", role) if self.options.stress else None for role in ROLES}
        judgement = judge(
            self.case,
            comparison,
            reference_control=controls["reference"],
            candidate_control=controls["candidate"],
            closeness=closeness,
            layouts=across.layouts if across else None,
            have_partners=bool(across and across.have_partners),
            reference_stress=stresses["reference"],
            candidate_stress=stresses["candidate"],
            races=tuple(self.races),
        )
        self._begin_explaining()
        explainer = Explainer(
            self.case,
            recordings,
            self._archives,
            self._replay,
            self._compare_bits,
            is_logged=bool(self._watches) and across is None,
            shows_bits=self._shows_bits,
            verifies=self.options.verify and across is None,
        )
        # Without partners a search would compare unrelated calls.
        if across is None or across.have_partners:
            judgement = explainer.explained(judgement, repeats(controls, stresses), self.options)
        # A pass of the user's may compute values that no record shows.
        leaves_calls = self.options.extra_passes and not self.options.every_call
        if judgement.verdict == Verdict.EQUAL and leaves_calls and self.graph:
            from bitproof.harness.localize.every_call import told_uncompared

            self.remarks.append(told_uncompared(self.case, self.graph.calls_uncompared, self.graph.calls))
        self.seconds.replay, self.every_call = explainer.seconds, explainer.every_call
        self.remarks += [*explainer.remarks, *races_beside(judgement, self.races)]
        return judgement, recordings

    def _across(self, firsts: dict[Role, Recording]) -> AcrossLayouts | None:
        """The comparison by logical tensor; None if the layouts are equal or the case states a bound."""
        if self.case.bound is not None or not are_laid_out_otherwise(self.case, *firsts.values()):
            return None

        def record(role: Role, arm: str, across: Across) -> Recorded:
            answer = self._run(replace(self._request(role, arm), across=across))
            return Recorded(self.folders.recording(role, arm).resolve(), answer.narrow)

        return compare_layouts(self.case, firsts, record, read_recording, self._ask)

    def _is_measurable(self, comparison: Comparison) -> bool:
        """Whether the case states a bound, and the two systems differ in values only."""
        differs = comparison.verdict == Verdict.DIFFERENT and not comparison.layout_mismatches
        return differs and self.case.bound is not None

    def _measure(self, comparison: Comparison) -> Closeness:
        """Measure how close the two recordings are in value.

        If the case expects a difference, only the first step that differs is measured.
        """
        began, first = time.monotonic(), comparison.first_divergence
        step = first.step if first and self.case.differs_within is not None else None
        reference, candidate = (self.folders.recording(role, "first").resolve() for role in ROLES)
        assert self.case.bound is not None, "only what has a bound is measured"
        found = self._ask(ClosenessRequest(reference=reference, candidate=candidate, bound=self.case.bound, step=step))
        self.seconds.closeness = time.monotonic() - began
        return found

    def _steps_of_control(self, comparison: Comparison) -> int:
        """The number of steps that a second run takes. If the options allow it, the run ends with the step of the first
        difference, and a remark reports that.

        For example, a difference in step 3 of 20 needs 4 steps. With a deliberate fault all steps run, since the fault
        may strike later, and a fault that never strikes is an error.
        """
        first = comparison.first_divergence
        if self.options.control != "up_to_difference" or first is None or self.options.inject is not None:
            return self.case.steps
        if (steps := first.step + 1) < self.case.steps:
            self.remarks.append(
                f"second runs took {steps} of {self.case.steps} steps: those up to the first difference"
            )
        return steps

    def _repeat(self, arm: Literal["control", "stress"], role: Role) -> Comparison:
        """Run a system once more, and compare it with itself."""
        began = time.monotonic()
        self.record(role, arm)
        first, case = self._read_first(role), self.case
        # A shortened control is compared with as many first steps.
        if arm == "control" and self._control_steps < case.steps:
            case = replace(case, steps=self._control_steps)
            first = first.first_steps(case.steps)
        found = compare(first, read_recording(self.folders.recording(role, arm)), case.of(role))
        self.seconds.note(arm, role, time.monotonic() - began)
        return found

    def _control(self, role: Role) -> Comparison:
        """A system's second run. If it fails while its calls are logged, run it again without the log."""
        try:
            return self._repeat("control", role)
        except BitproofError as error:
            if "control" not in self._watches:
                raise
            text = f"a second run of {role} {getattr(self.case, role)} failed while its calls were logged, and was made"
            self.remarks.append(f"{text} again without: {error.what}")
            # A log changes what a step costs in memory, for example, so the failure may be the log's own.
            self._watches.clear()
            shutil.rmtree(self._archives, ignore_errors=True)
            return self._repeat("control", role)

    def _read_first(self, role: Role) -> Recording:
        """The recording of a side's first run, read once."""
        if role not in self._firsts:
            self._firsts[role] = self.recording(role)
        return self._firsts[role]

    @property
    def _archives(self) -> Path:
        """Directory for the archives of replays."""
        return self.client.work / self.case.name

    def _begin_explaining(self) -> None:
        """Start a new time limit for the search for a cause, and for the second runs that it uses."""
        self._limit = self.options.explain_timeout
        self.deadline = time.monotonic() + self._limit

    def _replay(self, role: Role, number: int, folder: Path, replay: Replay) -> str | None:
        try:
            return self.record(role, f"replay{number}", out=folder, replay=replay).kept
        except RankError as error:
            if self._remaining() > 0:
                raise
            took, fix = f"finding the cause took longer than {self._limit:g} s", "give a longer --explain-timeout"
            raise RankError(took, found=error.what, where=error.where, fix=fix) from error

    def _note(self, role: Role, answer: RunAnswer) -> None:
        """Store a run's times and the facts about its graph."""
        setattr(self.seconds, role, answer.seconds.steps)
        self.memory[role] = answer.peak_mib
        if answer.throughput is not None:
            self.throughput[role] = answer.throughput
        if changed := answer.switches_changed:
            system = getattr(self.case, role)
            self.remarks.append(f"{role} {system} changed switches that bitproof had set: {', '.join(changed)}")
        self.seconds.note("start_ranks", role, answer.seconds.start_ranks)
        self.seconds.note("record", role, answer.seconds.record)
        self.races |= dict.fromkeys(answer.races)
        if graph := answer.graph:
            self.seconds.trace = (self.seconds.trace or 0.0) + graph.trace_seconds
            self.seconds.passes = (self.seconds.passes or {}) | {entry.name: entry.seconds for entry in graph.passes}
            self.graph = graph
            self.remarks += [graph.artifact.tell(role)] if graph.artifact else []
            self.remarks += [f"{role} {getattr(self.case, role)}: {told}" for told in graph.compiled]

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
            "sums_over_ranks": sums_over_ranks({role: first.manifest for role, first in self._firsts.items()}),
            "logs": self.folders.log_files(),
        }
