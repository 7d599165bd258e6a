"""Run cases: record both systems, compare, run each again where they differ, judge, look at the first differing bits.

The caller's process loads no torch. One host process does all that needs it; see `harness.host`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from harness.capture.machine import describe_machine
from harness.capture.store import read_recording
from harness.case import Case
from harness.compare.outcome import result_of, result_of_error
from harness.compare.verdict import Comparison, Judgement, compare, judge
from harness.devices import DeviceRequest, Placement, lease_gpus, place
from harness.errors import BitproofError, RankError, RecordingError
from harness.faults import check_fault, parse_fault
from harness.graph.options import check_extra_passes
from harness.host_process import HostLost, HostProcess
from harness.localize.blame import Culprit, facts_of, find_culprit
from harness.localize.calls import Call
from harness.localize.replay import OUTPUT, RECORD, OutputSite, Replay, archive_of, read_log
from harness.records import CaseResult, Closeness, Divergence, Key, Recording, Verdict

Role = Literal["reference", "candidate"]
ROLES: tuple[Role, ...] = ("reference", "candidate")
OnEvent = Callable[[dict[str, Any]], None]

START_TIMEOUT = 120.0
# The host watches a run's time itself and says more about it; it gets this much longer before it counts as silent.
_HOST_MARGIN = 15.0


@dataclass(frozen=True)
class RunOptions:
    """How to run cases, whatever they are. `timeout` is in seconds a case; `inject` goes into the candidate.

    `extra_passes`, texts in the form of `graph.options.SYNTAX`, go into the candidate's graph; `dump_graphs`
    writes every graph after every pass into the run folder. `control` says when each system runs a second
    time, to tell noise from defects. Two systems that agree in every bit are each other's control, so by
    default only those that differ get one.
    """

    device: DeviceRequest = "auto"
    timeout: float = 600.0
    control: Literal["when_different", "always", "never"] = "when_different"
    inject: str | None = None
    extra_passes: tuple[str, ...] = ()
    dump_graphs: bool = False
    verbose: bool = False


def run_cases(
    cases: Iterable[Case], options: RunOptions, run_dir: Path, on_event: OnEvent = lambda event: None
) -> Iterator[CaseResult]:
    """Run cases in order; each result comes as soon as its case is judged.

    The host starts now, not with the first result. Closing the iterator, an interrupt or SIGTERM ends
    every process that was started. Raises UsageError for a fault that cannot fire or an extra pass that is not
    there, and CaseError for a case that does not fit the machine, before any rank has started.

    Events are dicts: {"event": "prepare" | "prepared" | "start" | "step" | "compare" | "replay", "case", "system",
    "arm", ...}; "step" carries "step" and "steps".
    """
    cases = list(cases)
    if options.inject is not None:
        fault = parse_fault(options.inject)
        for case in cases:
            check_fault(fault, case)
    for case in cases:
        check_extra_passes(options.extra_passes, case)
    from harness import torchrun

    if torchrun.is_torchrun():
        return torchrun.run_cases(cases, options, run_dir, on_event)
    results = _run_cases(cases, options, Path(run_dir), on_event)
    next(results)  # starts the host; from here on results alone come
    return cast(Iterator[CaseResult], results)


def environment(device: DeviceRequest = "auto") -> dict[str, Any]:
    """What the report says of this machine, read without torch. Each case's result has its own device and backend."""
    return describe_machine() | {"device": device}


def record_system(
    case: Case, system: str, options: RunOptions, out: Path, run_dir: Path, on_event: OnEvent = lambda event: None
) -> Path:
    """Record one system at `out`, once. Raises what went wrong."""
    with _session(Path(run_dir), options) as session:
        placement = session.place(case)
        with lease_gpus(placement, case.parallelism.world_size):
            run = CaseRun(replace(case, reference=system), placement, session, options, on_event)
            run.record("reference", "first", out=Path(out))
    return Path(out)


def _run_cases(
    cases: list[Case], options: RunOptions, run_dir: Path, on_event: OnEvent
) -> Generator[CaseResult | None, None, None]:
    with _session(run_dir, options) as session:
        yield None
        for case, placement in zip(cases, [session.place(case) for case in cases], strict=True):
            with lease_gpus(placement, case.parallelism.world_size):
                result = CaseRun(case, placement, session, options, on_event).result()
            yield result


class Desk(Protocol):
    """What a case asks to run its systems: a session with a host, or rank 0 of torchrun's ranks."""

    run_dir: Path
    work: Path

    def ask(self, request: dict[str, Any], timeout: float, on_event: OnEvent) -> dict[str, Any]:
        """Answer one of the requests that `harness.host` describes, or raise BitproofError."""
        ...


class Session:
    """The host and the temporary folder that all cases of one call share.

    A host that crashed takes every later case with it: the machine or the installation is to blame. One
    that was killed because a case outlasted its time is replaced.
    """

    def __init__(self, run_dir: Path, options: RunOptions) -> None:
        self.run_dir = run_dir
        self.options = options
        self.work = Path(tempfile.mkdtemp(prefix="bitproof-"))
        self._crash: RankError | None = None
        self._num_gpus: int | None = None
        self._host = self._start()

    def ask(self, request: dict[str, Any], timeout: float, on_event: OnEvent) -> dict[str, Any]:
        """One request to the host; after it crashed, the same error for every further one."""
        if self._crash is not None:
            raise self._crash
        try:
            return self._host.ask(request, timeout, on_event)
        except HostLost as lost:
            if lost.silent:
                self._host = self._start()
            else:
                self._crash = lost.error
            raise lost.error from lost

    def place(self, case: Case) -> Placement:
        """Where a case runs. Raises CaseError when it does not fit the machine."""
        if self._num_gpus is None and self.options.device != "cpu":
            with contextlib.suppress(RankError):  # a host that cannot start says so again, as each case's result
                self._num_gpus = self.ask({"request": "environment"}, START_TIMEOUT, lambda event: None)["gpus"]
        return place(self.options.device, case.parallelism.world_size, self._num_gpus or 0)

    def close(self, *, kill: bool) -> None:
        """End the host and remove the temporary folder."""
        if kill:
            self._host.kill()
        else:
            self._host.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def _start(self) -> HostProcess:
        try:
            return HostProcess(self.run_dir / "logs" / "host.log", temporary=self.work, verbose=self.options.verbose)
        except BaseException:
            shutil.rmtree(self.work, ignore_errors=True)
            raise


@contextlib.contextmanager
def _session(run_dir: Path, options: RunOptions) -> Iterator[Session]:
    with _sigterm_raises():
        session = Session(run_dir, options)
        try:
            yield session
        except BaseException:
            session.close(kill=True)
            raise
        session.close(kill=False)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM unwind this process as an interrupt does, so that what it started is ended."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # a caller that handles SIGTERM unwinds by itself
        return

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class CaseRun:
    """One case, from its first run to its result."""

    def __init__(self, case: Case, placement: Placement, desk: Desk, options: RunOptions, on_event: OnEvent) -> None:
        self.case = case
        self.placement = placement
        self.desk = desk
        self.options = options
        self.deadline = time.monotonic() + options.timeout
        self.seconds: dict[str, Any] = {"trace": 0.0, "passes": {}, "reference": 0.0, "candidate": 0.0, "compare": 0.0}
        self.passes: list[dict[str, Any]] = []
        self.memory: dict[str, float | None] = {}
        self._num_replays = dict.fromkeys(ROLES, 0)
        self._on_event = on_event

    def result(self) -> CaseResult:
        """Run the case. Whatever goes wrong with it becomes its result."""
        where = {"device": self.placement.device, "backend": self.placement.backend}
        began = time.monotonic()
        try:
            judgement, recordings = self._judge()
        except BitproofError as error:
            self.seconds["total"] = time.monotonic() - began
            return result_of_error(self.case, error, **where, **self._measured())
        self.seconds["total"] = time.monotonic() - began
        losses = {role: recording.losses() for role, recording in recordings.items()}
        return result_of(self.case, judgement, **where, losses=losses, **self._measured())

    def record(self, role: Role, arm: str, *, out: Path | None = None, replay: Replay | None = None) -> dict[str, Any]:
        """One run of one system, recorded or replayed at `out`; returns what the host says of it."""
        system = getattr(self.case, role)
        label = self._label(role)
        suffix = "" if arm == "first" else f".{arm}"
        remaining = max(0.0, self.deadline - time.monotonic())
        request = {
            "request": "run",
            "case": self.case.to_dict(),
            "system": system,
            "arm": arm,
            "placement": self.placement.to_dict(),
            "out": str((out or self._recording(role, arm)).resolve()),
            "logs": str((self.desk.run_dir / "logs" / self.case.name / label).resolve()),
            "work": str(self.desk.work / f"{self.case.name}-{role}{suffix}"),
            "timeout": remaining,
            "case_timeout": self.options.timeout,
            "inject": self.options.inject if role == "candidate" else None,
            "replay": dataclasses.asdict(replay) if replay else None,
            "graph_options": {
                "extra_passes": self.options.extra_passes if role == "candidate" else (),
                "dump_dir": self._dump_dir(role) if self.options.dump_graphs and arm == "first" else None,
            },
        }
        about = {"case": self.case.name, "system": system, "arm": arm}
        return self.desk.ask(request, remaining + _HOST_MARGIN, lambda event: self._on_event(about | event))

    def _judge(self) -> tuple[Judgement, dict[Role, Recording]]:
        for role in ROLES:
            self._note(role, self.record(role, "first"))
        began = time.monotonic()
        self._on_event({"event": "compare", "case": self.case.name})
        recordings = {role: read_recording(self._recording(role, "first")) for role in ROLES}
        comparison = compare(recordings["reference"], recordings["candidate"], self.case)
        self.seconds["compare"] = time.monotonic() - began
        needs_control = self.options.control == "always" or (
            self.options.control == "when_different" and comparison.verdict == Verdict.DIFFERENT
        )
        closeness = self._measure() if self._is_measurable(comparison) else None
        controls = {role: self._control(role, recordings[role]) if needs_control else None for role in ROLES}
        judgement = judge(
            self.case,
            comparison,
            reference_control=controls["reference"],
            candidate_control=controls["candidate"],
            closeness=closeness,
        )
        if judgement.verdict == Verdict.DIFFERENT and judgement.first_divergence is not None:
            try:
                judgement = self._look_closer(judgement, judgement.first_divergence, recordings)
            except (RankError, RecordingError) as error:  # the verdict stands, whether or not its cause is found
                judgement = _add_error(judgement, f"a replay that looks for the cause failed:\n{error}")
        return judgement, recordings

    def _is_measurable(self, comparison: Comparison) -> bool:
        """Whether the case states a bound, and the two systems differ in nothing but values."""
        is_bounded = self.case.close_within is not None
        return is_bounded and comparison.verdict == Verdict.DIFFERENT and not comparison.layout_mismatches

    def _measure(self) -> Closeness:
        """How close the two recordings are in value."""
        began = time.monotonic()
        folders = {role: str(self._recording(role, "first").resolve()) for role in ROLES}
        request = {"request": "closeness", "bound": self.case.close_within} | folders
        remaining = max(0.0, self.deadline - time.monotonic())
        found = self.desk.ask(request, remaining + _HOST_MARGIN, self._on_event)
        self.seconds["closeness"] = time.monotonic() - began
        keys = {name: Key(*found[name]) for name in ("largest", "first_beyond") if found[name] is not None}
        return Closeness(**found | keys)

    def _control(self, role: Role, recording: Recording) -> Comparison:
        """Run a system a second time and compare it with itself."""
        self.record(role, "control")
        return compare(recording, read_recording(self._recording(role, "control")), self.case)

    def _look_closer(self, judgement: Judgement, first: Divergence, recordings: dict[Role, Recording]) -> Judgement:
        """Replay both systems up to the first difference: which call is to blame, and which bits differ.

        Two replays of each system: one logs every call of that step, one fetches the blamed call's output.
        """
        began = time.monotonic()
        key = Key(first.step, first.kind, first.name, first.rank)
        for role in ROLES:
            if self._replay(role, Replay(step=key.step, log=True, record=key)) != recordings[role].records[key].digest:
                return self._unrepeatable(judgement, role, key)
        if first.reference_type == first.candidate_type:  # elements of other types or shapes have no partners
            bits, _ = self._bits(1, key.rank, RECORD)
            first = replace(first, **bits)
        logs = {role: self._logs(role) for role in ROLES}
        differing = _differing(recordings["reference"], recordings["candidate"], key.step)
        culprit = find_culprit(logs["reference"], logs["candidate"], differing)
        if culprit is not None:
            first = replace(first, **facts_of(culprit))
            first = replace(first, **self._bits_of_output(culprit, logs, key.step))
        self.seconds["replay"] = time.monotonic() - began
        return replace(judgement, first_divergence=first)

    def _replay(self, role: Role, replay: Replay) -> str | None:
        """One more replay of a system; returns the digest of the record that it kept."""
        self._num_replays[role] += 1
        number = self._num_replays[role]
        arm = f"replay{number}"
        kept: str | None = self.record(role, arm, out=self._archives(role, number), replay=replay)["kept"]
        return kept

    def _archives(self, role: Role, number: int) -> Path:
        return self.desk.work / f"{self.case.name}-{role}.archives{number}"

    def _logs(self, role: Role) -> list[list[Call]]:
        """The first replay's calls, rank by rank."""
        return [read_log(archive_of(self._archives(role, 1), rank)) for rank in range(self.case.parallelism.world_size)]

    def _bits_of_output(self, culprit: Culprit, logs: dict[Role, list[list[Call]]], step: int) -> dict[str, Any]:
        """How the blamed call's output differs; nothing where it has no partner, or did not come again.

        What no record shows may vary, such as rows that nobody reads: that is no reason to doubt the verdict.
        """
        if culprit.reference is None or culprit.candidate is None:
            return {}
        indices: dict[Role, int] = {"reference": culprit.reference, "candidate": culprit.candidate}
        outputs = [logs[role][culprit.rank][index].outputs for role, index in indices.items()]
        position = next((i for i, pair in enumerate(zip(*outputs, strict=False)) if pair[0] != pair[1]), None)
        if position is None:
            return {}
        for role, index in indices.items():
            self._replay(role, Replay(step=step, output=OutputSite(culprit.rank, index, position)))
        bits, digests = self._bits(2, culprit.rank, OUTPUT)
        if digests != [output[position] for output in outputs]:
            return {}
        return {f"output_{name}": value for name, value in bits.items()}

    def _bits(self, number: int, rank: int, name: str) -> tuple[dict[str, Any], list[str]]:
        """How the values differ that a replay of each system left, and their digests."""
        archives = {role: str(archive_of(self._archives(role, number), rank)) for role in ROLES}
        remaining = max(0.0, self.deadline - time.monotonic())
        request = {"request": "bits", "name": name} | archives
        answer = self.desk.ask(request, remaining + _HOST_MARGIN, self._on_event)
        names = ("elements_differing", "elements", "max_ulp", "reference_bits", "candidate_bits")
        return {name: answer["bits"][name] for name in names if answer["bits"]}, answer["digests"]

    def _unrepeatable(self, judgement: Judgement, role: Role, key: Key) -> Judgement:
        text = (
            f"a replay of {role} {getattr(self.case, role)} did not reproduce step {key.step}, rank {key.rank}, "
            f"{key.kind} {key.name}: its bits differ from the recorded ones"
        )
        control = judgement.control | {role: Verdict.NONDETERMINISTIC.value}
        return replace(_add_error(judgement, text), verdict=Verdict.NONDETERMINISTIC, control=control)

    def _note(self, role: Role, answer: dict[str, Any]) -> None:
        """Keep a run's times, and what it says of its graph."""
        self.seconds[role] = answer["seconds"]["steps"]
        self.memory[role] = answer.get("peak_mib")
        self.seconds.setdefault("start_ranks", {})[role] = answer["seconds"]["start_ranks"]
        self.seconds.setdefault("record", {})[role] = answer["seconds"]["record"]
        if graph := answer["graph"]:
            self.seconds["trace"] += graph["seconds"].get("trace", 0.0)
            self.seconds["passes"] |= graph["seconds"].get("passes", {})
            self.passes = graph["passes"]

    def _measured(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "memory": self.memory, "passes": self.passes}

    def _recording(self, role: Role, arm: str) -> Path:
        suffix = "" if arm == "first" else f".{arm}"
        return self.desk.run_dir / "recordings" / self.case.name / f"{self._label(role)}{suffix}"

    def _dump_dir(self, role: Role) -> str:
        """Where a side's graphs go; where both sides have one, the reference's says so."""
        twin = role == "reference" and self.case.reference == self.case.candidate
        return str((self.desk.run_dir / "graphs" / f"{self.case.name}{'.reference' if twin else ''}").resolve())

    def _label(self, role: Role) -> str:
        """A folder name for one side; where both sides run one system, the candidate says so."""
        label = re.sub(r"[^\w.-]", "-", getattr(self.case, role))
        twin = role == "candidate" and self.case.reference == self.case.candidate
        return f"{label}.candidate" if twin else label


def _add_error(judgement: Judgement, text: str) -> Judgement:
    return replace(judgement, error=f"{judgement.error}\n{text}" if judgement.error else text)


def _differing(reference: Recording, candidate: Recording, step: int) -> dict[int, list[tuple[str, str]]]:
    """By rank, the digests of both systems for every record of one step in which they differ."""
    found: dict[int, list[tuple[str, str]]] = {}
    for key, record in candidate.records.items():
        other = reference.records.get(key)
        if key.step == step and other is not None and other.digest != record.digest:
            found.setdefault(key.rank, []).append((other.digest, record.digest))
    return found
