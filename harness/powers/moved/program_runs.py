"""Runs a program in an environment, to record its operator calls, or to replace their results by another environment's.

The program is a script, a function or a case.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
"""Environment variable with the path of the file that has a rank's request."""


@dataclass(frozen=True)
class OneProcess:
    """A program that runs in a single process: a script FILE.py, or a function FILE.py:FUNCTION."""

    program: str
    arguments: Sequence[str]
    steps: int

    def ask(self, environment: Environment, what: str, folder: Path, seconds: float, **asked: Any) -> dict[str, Any]:
        """Run the program in a process of this environment, and return the answer of `standalone/answer_request`.

        `what` is the request, and `asked` has its arguments:

        - "record" records the program's calls, with at most `budget` bytes of values.
        - "results" stores the results of some calls in a folder below `folder`, up to `budget` bytes. The calls are
          selected by `keys` and `inputs` (see `call_events.CallEvent`).
        - "exchange" runs the program once for each set of keys in `sets`, and lets the calls with these keys return the
          stored results.
        """
        results = str(folder / "results")
        more: dict[str, dict[str, Any]] = {
            "record": {"program": self.program, "arguments": [*self.arguments], "steps": self.steps},
            "results": {"out": results},
            # A run without exchanges needs no stored results.
            "exchange": {"results": results if any(asked.get("sets", ())) else None},
        }
        return environment.ask(what, {"folder": str(folder), **more[what], **asked}, seconds)


@dataclass
class CaseOnRanks:
    """Runs a case on all its ranks with `bitproof record`, in one environment after the other.

    - `system`: the system of the case to record.
    - `arguments`: further options of `bitproof record`, such as `--steps 2`.
    - `old`: the recording of the old environment.
    - `identities`: [identity of the old recording, identity of the new recording], once both recordings exist.
    """

    name: str
    system: str
    arguments: Sequence[str]
    old: Recording | None = None
    identities: list[RecordingIdentity] = field(default_factory=list)

    def ask(self, environment: Environment, what: str, folder: Path, seconds: float, **asked: Any) -> dict[str, Any]:
        """Run the case on all ranks, and combine their answers. Requests and answers are those of `OneProcess.ask`."""
        if what == "exchange":
            sets = asked["sets"]
            return {"runs": [self._run_exchanged(environment, folder, seconds, [*keys]) for keys in sets]}
        recording, answers = self._run(environment, what, folder, seconds, asked)
        if what == "results":
            counts = {name: sum(answer[name] for answer in answers) for name in ("kept", "lost")}
            return counts | {"repeats": self._compared(recording)["equal"]}
        # All later runs are compared with this first one.
        self.old = recording
        program = {"program": self.name, "arguments": [*self.arguments], "steps": recording.manifest.steps}
        return environment.ask("merge", {"folder": str(folder), "ranks": len(answers), **program}, seconds)

    def _run_exchanged(self, environment: Environment, folder: Path, seconds: float, keys: list[str]) -> dict[str, Any]:
        recording, answers = self._run(environment, "exchange", folder, seconds, {"keys": keys})
        # A run without exchanges is the plain new run, whose recording the certificate names.
        if not keys and self.old is not None:
            self.identities = [identity_of(self.old), identity_of(recording)]
        found = self._compared(recording) | {"exchanged": sum(answer["exchanged"] for answer in answers)}
        found["has_same_calls"] = all(answer["has_same_calls"] for answer in answers)
        for name in ("moved_again", "other"):
            # The first such call of any rank: a later one may follow from it.
            by_rank = [answer[name] | {"rank": rank} for rank, answer in enumerate(answers) if answer[name]]
            found[name] = min(by_rank, key=lambda each: each["call"], default=None)
        if found["moved_again"] is not None:
            found["other"] = None  # a rank that reads other values may have got them from the rank whose call moved
        return found

    def _compared(self, recording: Recording) -> dict[str, Any]:
        """Compare a recording with the recording of the old environment. Returns a dict:

        - "equal": whether the recordings are equal.
        - "first": the first differing record in words, or "".
        - "records": number of compared records.
        - "digest": digest of `recording`.

        Raises RecordingError if the recordings cannot be compared.
        """
        assert self.old is not None, "a case is recorded before it is compared"
        found = compare(self.old, recording, Case.from_dict(self.old.manifest.case))
        if found.verdict == Verdict.UNVERIFIED:
            raise RecordingError("the runs of the case cannot be compared", found=found.reason)
        first = found.first_divergence
        where = "" if first is None else f"{first.kind} {first.name} at step {first.step}, rank {first.rank}"
        facts = {"equal": found.verdict == Verdict.EQUAL, "first": where, "records": sum(found.compared.values())}
        return facts | {"digest": identity_of(recording).digest}

    def _run(
        self, environment: Environment, what: str, folder: Path, seconds: float, asked: dict[str, Any]
    ) -> tuple[Recording, list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory(prefix="bitproof-moved-") as temporary:
            request, out = Path(temporary, "request.json"), Path(temporary, "recording")
            content = {"what": what, "folder": str(folder.resolve()), "answers": temporary, "system": self.system}
            request.write_text(json.dumps(content | {"asked": asked}))
            # SYSTEM wraps the system of the case, which the request names.
            words = ["record", self.name, "--system", SYSTEM, "--out", str(out), "--report-dir", f"{temporary}/logs"]
            environment.bitproof([*words, *self.arguments], {REQUEST: str(request)}, seconds)
            recording, answers = read_recording(out), [*_answers(Path(temporary))]
        if len(answers) != recording.manifest.world_size:
            found = f"answers of {len(answers)} ranks of {recording.manifest.world_size}"
            raise RecordingError("not every rank of the case was watched to its last step", found=found)
        return recording, answers


ProgramRuns = OneProcess | CaseOnRanks


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    rank = 0
    # Ends at the first rank without an answer. The caller compares the number of answers.
    while (path := folder / f"rank{rank}.json").is_file():
        yield json.loads(path.read_text())
        rank += 1
