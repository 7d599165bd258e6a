"""Run a program in an environment: record its calls, keep their results, exchange them.

A script or a function runs in one process. A case runs on all its ranks as `bitproof record` runs it, with real process
groups: its system is `case_ranks.make`, which watches the calls of a rank.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.case import Case
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.moved.environments import Environment
from bitproof.harness.powers.moved.recording_identity import identity_of
from bitproof.harness.powers.moved.records import RecordingIdentity
from bitproof.harness.records import Recording, Verdict

SYSTEM = "bitproof.harness.powers.moved.case_ranks:make"
REQUEST = "BITPROOF_MOVED_REQUEST"
"""The variable that names the file with a rank's request."""


class ProgramRuns(Protocol):
    """Runs of one program. The answers are those of `standalone/recording_calls` and `standalone/exchanging`."""

    def record(self, environment: Environment, folder: Path, budget: int, seconds: float) -> dict[str, Any]:
        """Record the program's distinct calls into an archive; returns counts."""

    def keep(
        self,
        environment: Environment,
        folder: Path,
        keys: Sequence[str],
        inputs: Sequence[str],
        budget: int,
        seconds: float,
    ) -> dict[str, Any]:
        """Keep the results of calls with these keys or inputs; `repeats` says whether the run equals the recorded."""

    def exchange(
        self, environment: Environment, folder: Path, sets: Sequence[Sequence[str]], seconds: float
    ) -> list[dict[str, Any]]:
        """A run per set of keys, whose calls get the kept results."""


@dataclass(frozen=True)
class OneProcess:
    """A script FILE.py, or FILE.py:FUNCTION."""

    program: str
    arguments: Sequence[str]
    steps: int

    def record(self, environment: Environment, folder: Path, budget: int, seconds: float) -> dict[str, Any]:
        """Record its calls."""
        asked = {"program": self.program, "arguments": [*self.arguments], "steps": self.steps, "budget": budget}
        return environment.ask("record", {"folder": str(folder), **asked}, seconds)

    def keep(
        self,
        environment: Environment,
        folder: Path,
        keys: Sequence[str],
        inputs: Sequence[str],
        budget: int,
        seconds: float,
    ) -> dict[str, Any]:
        """Keep results."""
        asked = {"folder": str(folder), "out": str(folder / "results"), "budget": budget}
        return environment.ask("results", asked | {"keys": [*keys], "inputs": [*inputs]}, seconds)

    def exchange(
        self, environment: Environment, folder: Path, sets: Sequence[Sequence[str]], seconds: float
    ) -> list[dict[str, Any]]:
        """Run with results exchanged."""
        results = str(folder / "results") if any(sets) else None
        asked = {"folder": str(folder), "results": results, "sets": [[*keys] for keys in sets]}
        runs: list[dict[str, Any]] = environment.ask("exchange", asked, seconds)["runs"]
        return runs


@dataclass
class CaseOnRanks:
    """A case; `system` is recorded, and `arguments` are further options of `bitproof record`, such as `--steps 2`."""

    name: str
    system: str
    arguments: Sequence[str]
    old: Recording | None = None
    identities: list[RecordingIdentity] = field(default_factory=list)

    def record(self, environment: Environment, folder: Path, budget: int, seconds: float) -> dict[str, Any]:
        """Record the calls of every rank, and merge them."""
        self.old, answers = self._run(environment, folder, "record", {"budget": budget}, seconds)
        told = {"program": self.name, "arguments": [*self.arguments], "steps": self.old.manifest.steps}
        return environment.ask("merge", {"folder": str(folder), "ranks": len(answers), **told}, seconds)

    def keep(
        self,
        environment: Environment,
        folder: Path,
        keys: Sequence[str],
        inputs: Sequence[str],
        budget: int,
        seconds: float,
    ) -> dict[str, Any]:
        """Keep results, on every rank."""
        asked = {"keys": [*keys], "inputs": [*inputs], "budget": budget}
        recording, answers = self._run(environment, folder, "results", asked, seconds)
        told = {name: sum(answer[name] for answer in answers) for name in ("kept", "lost")}
        return told | {"repeats": self._compared(recording)["equal"]}

    def exchange(
        self, environment: Environment, folder: Path, sets: Sequence[Sequence[str]], seconds: float
    ) -> list[dict[str, Any]]:
        """Run with results exchanged on all ranks."""
        return [self._exchanged(environment, folder, keys, seconds) for keys in sets]

    def _exchanged(self, environment: Environment, folder: Path, keys: Sequence[str], seconds: float) -> dict[str, Any]:
        recording, answers = self._run(environment, folder, "exchange", {"keys": [*keys]}, seconds)
        if not keys and self.old is not None:
            self.identities = [identity_of(self.old), identity_of(recording)]
        found = self._compared(recording) | {"exchanged": sum(answer["exchanged"] for answer in answers)}
        found["has_same_calls"] = all(answer["has_same_calls"] for answer in answers)
        # A rank that only reads other values may have got them from another rank.
        for name in ("moved_again", "other"):
            by_rank = [answer[name] | {"rank": rank} for rank, answer in enumerate(answers) if answer[name]]
            found[name] = min(by_rank, key=lambda each: each["call"], default=None)
        if found["moved_again"] is not None:
            found["other"] = None
        return found

    def _compared(self, recording: Recording) -> dict[str, Any]:
        """Whether a recording is equal to the old one, and the first record that differs."""
        assert self.old is not None, "a case is recorded before it is compared"
        found = compare(self.old, recording, Case.from_dict(self.old.manifest.case))
        if found.verdict == Verdict.UNVERIFIED:
            raise RecordingError("the runs of the case cannot be compared", found=found.reason)
        first = found.first_divergence
        where = "" if first is None else f"{first.kind} {first.name} at step {first.step}, rank {first.rank}"
        equal = found.verdict == Verdict.EQUAL
        told = {"equal": equal, "first": where, "records": sum(found.compared.values())}
        return told | {"digest": identity_of(recording).digest}

    def _run(
        self, environment: Environment, folder: Path, what: str, asked: dict[str, Any], seconds: float
    ) -> tuple[Recording, list[dict[str, Any]]]:
        """Record the case once, and read the answers of its ranks."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bitproof-moved-") as temporary:
            request, out = Path(temporary, "request.json"), Path(temporary, "recording")
            told = {"what": what, "folder": str(folder.resolve()), "answers": temporary, "system": self.system}
            request.write_text(json.dumps(told | {"asked": asked}))
            words = ["record", self.name, "--system", SYSTEM, "--out", str(out), "--report-dir", f"{temporary}/logs"]
            environment.bitproof([*words, *self.arguments], {REQUEST: str(request)}, seconds)
            return read_recording(out), [*_answers(Path(temporary))]


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    rank = 0
    while (path := folder / f"rank{rank}.json").is_file():
        yield json.loads(path.read_text())
        rank += 1
