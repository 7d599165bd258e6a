"""What a search for the cause keeps, whatever fails after it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.errors import RankError
from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.logs.replay import Replay, StepTrace, archive_of, write_archive
from bitproof.harness.localize.search import Search
from bitproof.harness.records import Divergence, Key, Manifest, Record, Recording

FORWARD = Place("layers.0", "forward")
KEY = Key(0, "loss", "loss", 0)


def recording(digest: str) -> Recording:
    return Recording(Manifest(case={}, system="toy", world_size=1, steps=1), {KEY: Record(digest, "float32", ())})


@pytest.mark.parametrize("number", [1, 2])
def test_a_cause_that_was_found_stays_where_its_bits_cannot_be_had(tmp_path: Path, number: int) -> None:
    """Neither those of the first differing tensor nor those of the blamed call's output are worth it."""
    logs = {role: [Call(FORWARD, "silu", ("a",), (value,))] for role, value in (("reference", "b"), ("candidate", "B"))}

    def run_replay(role: Any, turn: int, folder: Path, replay: Replay) -> str:
        if turn == 2 == number:
            raise RankError("rank 0 was killed by SIGSEGV")
        write_archive(archive_of(folder, 0), StepTrace(logs[role], [(0, 1)]))
        return "b" if role == "reference" else "B"

    def bits(*_: Any) -> Any:
        raise RankError("no bits")

    search = Search(
        {"reference": recording("b"), "candidate": recording("B")},
        tmp_path,
        1,
        run_replay,
        bits,  # type: ignore[arg-type]
    )
    found = search.explain(Divergence(**KEY._asdict()))
    assert found.call is not None and (found.call.operator, found.call.output) == ("silu", None)
    assert search.remarks[0] == (
        "the bits of the first differing tensor on rank 0 could not be fetched; the verdict stands, and so does the "
        "cause: no bits"
    )
    assert search.remarks[1].startswith("the bits of what silu of layers.0 (forward) gave on rank 0 could not be")
