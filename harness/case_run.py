"""One case, from its first run to its result: record both systems, compare, run both again, judge, find the cause."""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.baselines import values_to_keep
from harness.capture.store import read_recording
from harness.case import Case
from harness.compare.outcome import result_of, result_of_error
from harness.compare.verdict import Comparison, Judgement, Repeat, compare, judge, repeats
from harness.devices import Placement
from harness.errors import BitproofError, RankError, RecordingError
from harness.localize.noise import NoiseSearch
from harness.localize.replay import Replay
from harness.localize.search import Search, UnrepeatableError
from harness.records import CaseResult, Closeness, Divergence, Key, Recording, Verdict
from harness.run_options import ROLES, OnEvent, Role, RunOptions
from harness.session import Desk
from harness.stress import Stress

# The host watches a run's time itself and says more about it; it gets this much longer before it counts as silent.
_HOST_MARGIN = 15.0


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
        request = {
            "request": "run",
            "case": self.case.to_dict(),
            "system": system,
            "arm": arm,
            "placement": self.placement.to_dict(),
            "out": str((out or self._recording(role, arm)).resolve()),
            "logs": str((self.desk.run_dir / "logs" / self.case.name / label).resolve()),
            "work": str(self.desk.work / f"{self.case.name}-{role}{suffix}"),
            "timeout": self._remaining(),
            "case_timeout": self.options.timeout,
            "inject": self.options.inject if role == "candidate" else None,
            "replay": dataclasses.asdict(replay) if replay else None,
            "values": self.options.values + values_to_keep(self.options.baseline_dir, self.case, system),
            "graph_options": {
                "extra_passes": self.options.extra_passes if role == "candidate" else (),
                "dump_dir": self._dump_dir(role) if self.options.dump_graphs and arm == "first" else None,
            },
            "stress": dataclasses.asdict(self._stress) if arm == "stress" or (replay and replay.stressed) else None,
            "names": dict(self.options.names) if role == "candidate" else {},
        }
        about = {"case": self.case.name, "system": system, "arm": arm}
        return self._ask(request, about)

    def recording(self, role: Role) -> Recording:
        """What the first run of one side recorded. Raises RecordingError when there is none."""
        return read_recording(self._recording(role, "first"))

    def recordings(self) -> dict[Role, Path]:
        """Where each side's recording lies, once it was made."""
        return {role: self._recording(role, "first") for role in ROLES}

    def _ask(self, request: dict[str, Any], about: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Ask the desk, within the case's time. `about` is added to every event."""
        timeout = self._remaining() + _HOST_MARGIN
        return self.desk.ask(request, timeout, lambda event: self._on_event({**about, **event}))

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _judge(self) -> tuple[Judgement, dict[Role, Recording]]:
        for role in ROLES:
            self._note(role, self.record(role, "first"))
        began = time.monotonic()
        self._on_event({"event": "compare", "case": self.case.name})
        recordings = {role: read_recording(self._recording(role, "first")) for role in ROLES}
        comparison = compare(recordings["reference"], recordings["candidate"], self.case)
        self.seconds["compare"] = time.monotonic() - began
        closeness = self._measure() if self._is_measurable(comparison) else None
        needs_control = self.options.control == "always" or (
            self.options.control == "when_different" and comparison.verdict == Verdict.DIFFERENT
        )
        controls = self._repeat("control", recordings) if needs_control else dict.fromkeys(ROLES)
        stresses = self._repeat("stress", recordings) if self.options.stress else dict.fromkeys(ROLES)
        judgement = judge(
            self.case,
            comparison,
            reference_control=controls["reference"],
            candidate_control=controls["candidate"],
            closeness=closeness,
            reference_stress=stresses["reference"],
            candidate_stress=stresses["candidate"],
        )
        first = judgement.first_divergence
        if judgement.verdict == Verdict.DIFFERENT and first is not None:
            judgement = self._find_cause(judgement, first, recordings)
        elif judgement.verdict == Verdict.NONDETERMINISTIC and first is not None:
            found = repeats(controls, stresses)
            repeat = next(repeat for repeat in found if repeat.between == first.between)
            judgement = self._find_noise(judgement, first, repeat, recordings)
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
        found = self._ask(request)
        self.seconds["closeness"] = time.monotonic() - began
        keys = {name: Key(*found[name]) for name in ("largest", "first_beyond") if found[name] is not None}
        return Closeness(**found | keys)

    def _repeat(self, arm: str, recordings: dict[Role, Recording]) -> dict[Role, Comparison | None]:
        """Run each system once more, and compare it with itself."""
        found: dict[Role, Comparison | None] = {}
        for role in ROLES:
            began = time.monotonic()
            self.record(role, arm)
            found[role] = compare(recordings[role], read_recording(self._recording(role, arm)), self.case)
            self.seconds.setdefault(arm, {})[role] = time.monotonic() - began
        return found

    @property
    def _stress(self) -> Stress:
        assert self.options.stress is not None, "only a call that asks for stress has stressed runs"
        return self.options.stress

    def _find_cause(self, judgement: Judgement, first: Divergence, recordings: dict[Role, Recording]) -> Judgement:
        """Replay both systems to find the call to blame."""
        search = Search(recordings, self._archives, self.case.parallelism.world_size, self._replay, self._ask)

        def explain() -> Judgement:
            try:
                return replace(judgement, first_divergence=search.explain(first))
            except UnrepeatableError as error:
                return self._unrepeatable(judgement, error.role, error.key, recordings)

        return self._explained(judgement, explain)

    def _find_noise(
        self, judgement: Judgement, first: Divergence, repeat: Repeat, recordings: dict[Role, Recording]
    ) -> Judgement:
        """Replay one system twice to find the call that makes it differ from itself."""
        search = NoiseSearch(
            recordings,
            self._archives / "noise",
            self.case.parallelism.world_size,
            self._replay,
            self._ask,
            role=repeat.side,
            stressed=repeat.stressed,
        )

        def explain() -> Judgement:
            explained, told = search.explain_noise(first)
            found = replace(judgement, first_divergence=explained)
            return _add_error(found, told) if told else found

        return self._explained(judgement, explain)

    def _explained(self, judgement: Judgement, explain: Callable[[], Judgement]) -> Judgement:
        """What replays add to a judgement. Its verdict stands, whether or not they find a cause."""
        began = time.monotonic()
        try:
            return explain()
        except (RankError, RecordingError) as error:
            return _add_error(judgement, f"a replay that looks for the cause failed:\n{error}")
        finally:
            self.seconds["replay"] = time.monotonic() - began
            shutil.rmtree(self._archives, ignore_errors=True)

    @property
    def _archives(self) -> Path:
        """Where replays leave what they were asked for, until the cause is found."""
        return self.desk.work / self.case.name

    def _replay(self, role: Role, number: int, folder: Path, replay: Replay) -> str | None:
        kept: str | None = self.record(role, f"replay{number}", out=folder, replay=replay)["kept"]
        return kept

    def _unrepeatable(self, judgement: Judgement, role: Role, key: Key, recordings: dict[Role, Recording]) -> Judgement:
        """What a replay that differs from its recording makes of a case: it is a control that came late."""
        text = (
            f"a replay of {role} {getattr(self.case, role)} did not reproduce step {key.step}, rank {key.rank}, "
            f"{key.kind} {key.name}: its bits differ from the recorded ones"
        )
        parted = Comparison(verdict=Verdict.DIFFERENT, first_divergence=Divergence(**key._asdict()))
        repeat = Repeat(role, False, parted)
        judgement = replace(
            _add_error(judgement, text),
            verdict=Verdict.NONDETERMINISTIC,
            control=judgement.control | {role: Verdict.NONDETERMINISTIC.value},
            first_divergence=repeat.divergence(),
        )
        assert judgement.first_divergence is not None
        return self._find_noise(judgement, judgement.first_divergence, repeat, recordings)

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
        return {"seconds": self.seconds, "memory": self.memory, "passes": self.passes, "logs": self._logs()}

    def _logs(self) -> list[str]:
        """Every log of the case, as a path within the run folder."""
        files = (self.desk.run_dir / "logs" / self.case.name).rglob("*.log")
        return sorted((path.relative_to(self.desk.run_dir).as_posix() for path in files), key=_by_number)

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


def _by_number(path: str) -> list[Any]:
    """A sort key that puts rank10 behind rank9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.removesuffix(".log"))]


def _add_error(judgement: Judgement, text: str) -> Judgement:
    return replace(judgement, error=f"{judgement.error}\n{text}" if judgement.error else text)
