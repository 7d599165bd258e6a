"""Steps of one rank as two sides, replayed in this process: what a search for a cause asks of a session's ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.capture.digest import digest
from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.localize.culprit import Culprit
from bitproof.harness.localize.exchange.verifier import Verifier
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.replay import Replay, StepTrace, archive_of, read_log, read_types, write_archive
from bitproof.harness.records import Key, Manifest, Record, Recording, Role, Verification

Step = Callable[[], Mapping[str, Tensor]]
"""One step; what it returns is recorded as gradients."""


class Sides:
    """A reference and a candidate, each a function that takes the step; `asked` has the replays that were run."""

    def __init__(
        self, folder: Path, reference: Step, candidate: Step, settings: Sequence[DifferingSetting] = ()
    ) -> None:
        self.folder, self.settings = folder, settings
        self.steps: dict[Role, Step] = {"reference": reference, "candidate": candidate}
        self.asked: list[tuple[Role, Replay]] = []
        self.recordings = {role: self._recording(role, step()) for role, step in self.steps.items()}
        self.logs: dict[Role, list[list[Call]]] = {}
        for role in self.steps:
            self.run_replay(role, 1, folder / f"{role}.archives1", Replay(step=0, log=True))
            self.logs[role] = [read_log(archive_of(folder / f"{role}.archives1", 0))]
        self.asked.clear()

    def run_replay(self, role: Role, number: int, folder: Path, replay: Replay) -> str | None:
        """Take a side's step as a rank does in a replay, and leave its archive."""
        self.asked.append((role, replay))
        with logged(
            self.steps[role], replay.values_of(0), only_keeps=not replay.log, exchanges=replay.exchanges
        ) as log:
            shown = self.steps[role]()
        names = replay.values_of(0)
        trace = StepTrace(values={names[site]: value for site, value in log.kept.items() if site in names})
        trace.records = self._recording(role, shown).records
        trace.exchanged = [*log.exchanges.made, *log.exchanges.left_out()]
        if replay.log:
            trace.add_calls(0, log.calls)
            trace.types = log.types
        write_archive(archive_of(folder, 0), trace)
        return None

    def verifier(self) -> Verifier:
        """What verifies causes of these sides."""
        types = {
            digest: type_
            for role in self.steps
            for digest, type_ in read_types(archive_of(self.folder / f"{role}.archives1", 0)).items()
        }
        return Verifier(self.recordings, self.folder, 0, self.logs, self.run_replay, (), self.settings, types)

    def verified(self, culprit: Culprit | None = None) -> tuple[Culprit, Verification]:
        """What exchanges show of a cause, by default of the one that a search finds."""
        verifier = self.verifier()
        found = [culprit] if culprit else verifier.blamed(self.recordings["candidate"], verifier.ready)
        return verifier.verify(*found)

    def blamed(self, operator: str, turn: int = 0, how: Any = "computes") -> Culprit:
        """A cause given deliberately: the candidate's call of an operator, and the reference's if it has one."""

        def index(role: Role) -> int | None:
            there = (i for i, call in enumerate(self.logs[role][0]) if call.operator.startswith(operator))
            return next(itertools.islice(there, turn, None), None)

        mine, theirs = index("candidate"), index("reference")
        assert mine is not None
        return Culprit(how=how, call=self.logs["candidate"][0][mine], ranks=(0,), candidate=mine, reference=theirs)

    @staticmethod
    def _recording(role: Role, shown: Mapping[str, Tensor]) -> Recording:
        rows = {
            Key(0, "grad", name, 0): Record(digest(value), str(value.dtype), tuple(value.shape))
            for name, value in shown.items()
        }
        return Recording(Manifest(case={}, system=role, world_size=1, steps=1), rows)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Parameters of these shapes, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
