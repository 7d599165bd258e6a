"""A reference that cases share is run once for all of them, and again as its control; nothing else is shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case
from bitproof.harness.execute.failures import Failure
from bitproof.harness.execute.requests import RankSlots, RunRequest
from bitproof.harness.execute.status_messages import End
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import RunOptions
from tests.cuda_lane.references import taken_once
from tests.cuda_lane.selection import SHARED, TAKEN

PLAIN, OFFLOADED = CASES["blocks_batch_selective"], CASES["blocks_batch_offload"]


class Lane:
    """Runs that leave, as the only rank's record, how many there were before; `words` is what became of each."""

    def __init__(self, folder: Path, failure: Failure | None = None) -> None:
        self.words: list[str] = []
        self._folder = folder
        self._failure = failure
        self._count = 0
        self._run = taken_once(self._run_ranks, self.words.append)

    def _run_ranks(
        self, request: RunRequest, rank_slots: RankSlots, send: object, hangup: object, program: object = None
    ) -> End:
        part = Path(rank_slots.part.format(rank=0))
        part.parent.mkdir(parents=True)
        part.write_text(f"{self._count}")
        self._count += 1
        return End(failure=self._failure)

    def record(self, case: Case, system: str = "eager_chunked", arm: str = "first", **facts: Any) -> str:
        """What the run of a system left."""
        work = self._folder / f"{case.name}-{system}-{arm}-{len(list(self._folder.iterdir()))}"
        about = {"placement": Placement(), "out": work, "logs": work, "work": work, "timeout": 1.0, "case_timeout": 1.0}
        request = RunRequest(case=case, system=system, arm=arm, **about, **facts)  # type: ignore[arg-type]
        rank_slots = RankSlots(ranks=(0,), part=str(work / "parts" / "rank{rank}"), store="")
        self._run(request, rank_slots, None, None)
        return Path(rank_slots.part.format(rank=0)).read_text()


def test_cases_that_differ_in_passes_alone_share_a_reference_and_its_control(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    arms = ("first", "control")
    assert [lane.record(case, arm=arm) for case in (PLAIN, OFFLOADED) for arm in arms] == ["0", "1", "0", "1"]
    assert lane.words == [TAKEN, TAKEN, SHARED, SHARED]


@pytest.mark.parametrize(
    "other",
    [
        replace(OFFLOADED, seed=7),
        replace(OFFLOADED, steps=3),
        CASES["blocks_batch_bf16_reduce"],
        CASES["experts_batch_offload"],
    ],
    ids=["another seed", "more steps", "another precision", "other modules in chunks"],
)
def test_a_case_whose_reference_computes_something_else_has_its_own(tmp_path: Path, other: Case) -> None:
    lane = Lane(tmp_path)
    assert [lane.record(PLAIN), lane.record(other)] == ["0", "1"] and lane.words == [TAKEN, TAKEN]


def test_what_runs_a_graph_is_run_for_every_case_and_so_is_what_a_fault_disturbs(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    assert [lane.record(PLAIN, "graph") for _ in range(2)] == ["0", "1"]
    assert [lane.record(PLAIN, options=RunOptions(inject="sum-order:order=descending")) for _ in range(2)] == ["2", "3"]
    assert lane.words == []


def test_a_run_that_failed_is_not_kept(tmp_path: Path) -> None:
    lane = Lane(tmp_path, Failure(rank=0, time=0.0, what="raised"))
    assert [lane.record(PLAIN), lane.record(OFFLOADED)] == ["0", "1"]
