"""What a search for the cause keeps, whatever fails after it was found."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bitproof.harness.compare.bits import BitDifference, ComparedBits
from bitproof.harness.errors import RankError
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.replay import (
    RECORD,
    Replay,
    StepTrace,
    ValueSite,
    archive_of,
    archives_of,
    copy_spare_values,
    name_of_spare,
    name_of_value,
    read_value,
    write_archive,
)
from bitproof.harness.localize.search import Search
from bitproof.harness.records import Divergence, Key, Manifest, Record, Recording
from tests.harness.localize.written_logs import with_producers

FORWARD = CallSite("layers.0", "forward")
KEY = Key(0, "loss", "loss", 0)


def recording(digest: str) -> Recording:
    return Recording(Manifest(case={}, system="toy", world_size=1, steps=1), {KEY: Record(digest, "float32", ())})


def test_the_chain_says_of_each_call_how_its_output_differs_from_that_of_the_same_turn(tmp_path: Path) -> None:
    """Of one that the other side does not make, and of one whose output does not come again, nothing is known."""
    forward = [("mm", "x", "a"), ("silu", "a", "b"), ("neg", "b", "c"), ("tanh", "c", "d"), ("sum", "d", "e")]
    logs: dict[Any, list[Call]] = {
        "reference": [Call(FORWARD, name, (x,), (y,)) for name, x, y in forward if name != "neg"],
        "candidate": [Call(FORWARD, name, (x.upper(),), (y.upper(),)) for name, x, y in forward],
    }
    logs["candidate"][0] = Call(FORWARD, "mm", ("x",), ("A",))
    asked: list[tuple[ValueSite, ...]] = []

    def run_replay(role: Any, turn: int, folder: Path, replay: Replay) -> str:
        asked.append(replay.values)
        write_archive(archive_of(folder, 0), StepTrace(with_producers(logs[role]), [(0, 1)]))
        return "e" if role == "reference" else "E"

    def bits(_: Any, name: str) -> ComparedBits:
        digests = {"value0": ("a", "A"), "value1": ("b", "B"), "value2": ("d", "other"), "value3": ("e", "E")}
        number = list(digests).index(name) if name in digests else 9
        difference = BitDifference(elements=8, elements_differing=number + 1, max_ulp=number)
        return ComparedBits(difference=difference, digests=digests.get(name, ("e", "E")))

    recordings: Any = {"reference": recording("e"), "candidate": recording("E")}
    found = Search(recordings, tmp_path, 1, run_replay, bits).explain(Divergence(**KEY._asdict()))
    assert found.call is not None and found.call.chain is not None and found.call.output is not None
    changed = [(link.operator, link.elements_differing, link.elements, link.max_ulp) for link in found.call.chain]
    unknown = None, None, None
    assert changed == [("mm", 1, 8, 0), ("silu", 2, 8, 1), ("neg", *unknown), ("tanh", *unknown), ("sum", 4, 8, 3)]
    assert found.call.output.elements_differing == 1
    assert [[site.call for site in sites] for sites in asked] == [[], [], [0, 1, 2, 3], [0, 1, 3, 4]]


def test_values_that_logged_runs_have_kept_are_not_fetched_again(tmp_path: Path) -> None:
    """Each side's by itself: where one did not keep what is asked for, it alone is replayed."""
    asked: list[Any] = []

    def left(role: Any, value: str, spare: dict[str, Any]) -> None:
        log = [Call(FORWARD, "neg", ("x",), ("y",)), Call(FORWARD, "silu", ("a",), (value,))]
        write_archive(archive_of(archives_of(tmp_path, role), 0), StepTrace(log, [(0, 2)], spare=spare))

    def run_replay(role: Any, turn: int, folder: Path, replay: Replay) -> str:
        asked.append((role, turn))
        write_archive(archive_of(folder, 0), StepTrace(values={name_of_value(0): torch.ones(3)}))
        return "b"

    def bits(archives: Any, name: str) -> ComparedBits:
        if name == RECORD:
            raise RankError("not asked for")
        values = [read_value(archives[role], name) for role in ("reference", "candidate")]
        found = BitDifference(elements=int(values[0].sum()), elements_differing=int(values[1].sum()))
        return ComparedBits(difference=found, digests=("b", "B"))

    recordings: Any = {"reference": recording("b"), "candidate": recording("B")}
    for spare, runs in (
        (name_of_spare(ValueSite(0, 1, 0)), []),
        (name_of_spare(ValueSite(0, 0, 0)), [("candidate", 2)]),
    ):
        left("reference", "b", {name_of_spare(ValueSite(0, 1, 0)): torch.ones(2)})
        left("candidate", "B", {spare: torch.ones(3)})
        found = Search(recordings, tmp_path, 1, run_replay, bits, is_logged=True).explain(Divergence(**KEY._asdict()))
        assert found.call is not None and found.call.output is not None
        assert (found.call.operator, found.call.output.elements, found.call.output.elements_differing) == ("silu", 2, 3)
        assert asked == runs


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
        bits,
    )
    found = search.explain(Divergence(**KEY._asdict()))
    assert found.call is not None and (found.call.operator, found.call.output) == ("silu", None)
    assert search.remarks[0] == (
        "the bits of the first differing tensor on rank 0 could not be fetched; the verdict stands, and so does the "
        "cause: no bits"
    )
    assert search.remarks[1].startswith("the bits of the output of silu of layers.0 (forward) on rank 0 could not be")


def test_a_replay_s_values_are_read_one_by_one_and_damaged_spare_ones_are_not_handed_on(tmp_path: Path) -> None:
    """What was asked for may be large: reading one must not read all."""
    source, target = tmp_path / "source", tmp_path / "target"
    asked = {name_of_value(number): torch.full((2,), float(number)) for number in range(2)}
    write_archive(
        archive_of(source, 0), StepTrace(values=asked, spare={name_of_spare(ValueSite(0, 3, 0)): torch.ones(4)})
    )
    assert {*asked, "spare"} <= {*zipfile.ZipFile(archive_of(source, 0)).namelist()}
    assert read_value(archive_of(source, 0), name_of_value(1)).tolist() == [1.0, 1.0]
    assert copy_spare_values(source, target, [ValueSite(0, 3, 0)]) and not copy_spare_values(
        source, target, [ValueSite(0, 4, 0)]
    )
    assert read_value(archive_of(target, 0), name_of_value(0)).tolist() == [1.0] * 4
    sizes = ("", "no sizes", "[]", *(f'{{"call3.output0": {size}}}' for size in ('"many"', "-1", "3", "10000")))
    for damaged in (f"{line}\n1234".encode() for line in sizes):
        with zipfile.ZipFile(archive_of(source, 0), "w") as archive:
            archive.writestr("spare", damaged)
        assert not copy_spare_values(source, target, [ValueSite(0, 3, 0)])
