"""What a recording's manifest says of a graph and of values."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitproof.harness.errors import RankError, RecordingError
from bitproof.harness.execute.host import answerer
from bitproof.harness.execute.host.answerer import Answerer, finish_run, join_recording, refuse_other_placements
from bitproof.harness.execute.requests import (
    BitsRequest,
    ClosenessRequest,
    Machine,
    MachineRequest,
)
from bitproof.harness.execute.status_messages import Done, End, PreparedGraph
from bitproof.harness.options import RunOptions
from bitproof.harness.records import GraphIdentity, PassReport, PassSettings
from tests.harness.execute.test_requests import request

PASSES = [
    {
        "name": "clean_up",
        "seconds": 0.1,
        "nodes_before": 9,
        "nodes_after": 8,
        "settings": {},
        "facts": {},
        "changed": {},
    },
    {
        "name": "chunk",
        "seconds": 0.2,
        "nodes_before": 8,
        "nodes_after": 14,
        "settings": {"dim": "batch"},
        "facts": {"split": 3},
        "changed": {"cat": [0, 1]},
    },
]


def test_a_manifest_has_the_modules_that_all_ranks_ran_in_chunks_and_a_rank_that_did_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = []
    monkeypatch.setattr(answerer, "join_parts", lambda out, manifest, parts, values: manifests.append(manifest))
    done = [Done(chunked={"layers.0": calls}) for calls in (1, 2)]
    join_recording(request(tmp_path), None, done[:1] * 2, [], [])
    assert manifests[0].chunked == {"layers.0": 1}
    with pytest.raises(RecordingError, match="rank 1 of graph ran other modules in chunks than rank 0"):
        join_recording(request(tmp_path), None, done, [], [])


def test_a_manifest_has_the_ordered_passes_with_their_settings_and_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = []
    monkeypatch.setattr(answerer, "join_parts", lambda out, manifest, parts, values: manifests.append(manifest))
    for seconds in (0.1, 0.2):
        passes = [PassReport(**p | {"seconds": seconds}) for p in PASSES]
        graph = PreparedGraph(code_hash="c", passes=passes, trace_seconds=seconds)
        join_recording(request(tmp_path), graph, [Done()], [], [])
    assert manifests[0].graph == GraphIdentity(
        code_hash="c",
        passes=[PassSettings(name="clean_up", settings={}), PassSettings(name="chunk", settings={"dim": "batch"})],
    )
    assert manifests[0] == manifests[1]


def test_a_manifest_says_which_values_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = []
    monkeypatch.setattr(answerer, "join_parts", lambda out, manifest, parts, values: manifests.append(manifest))
    join_recording(request(tmp_path, options=RunOptions(values=("0/*",))), None, [Done()], [], [])
    assert manifests[0].values == ["0/*"]


def test_a_run_of_several_places_is_reported_by_the_slowest_and_needs_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    monkeypatch.setattr(answerer, "join_parts", lambda out, manifest, parts, values: joined.append(parts))
    graph = PreparedGraph(code_hash="c")
    done = [Done(seconds=1.0, record_seconds=0.5, peak_mib=None), Done(seconds=2.0, peak_mib=7.0, kept="digest")]
    ends = [End(done=[account], graph=graph, start_seconds=account.seconds) for account in done]
    parts = [tmp_path / "part0", tmp_path / "part1"]
    answer = finish_run(request(tmp_path), ends, parts)
    assert joined == [parts]
    assert (answer.graph, answer.peak_mib, answer.kept) == (graph, 7.0, "digest")
    assert (answer.seconds.steps, answer.seconds.start_ranks, answer.seconds.record) == (2.0, 2.0, 0.5)
    other = End(done=done[1:], graph=PreparedGraph(code_hash="d"))
    with pytest.raises(RankError, match="rank 1 prepared another graph than rank 0\n  found: code hash d, not c"):
        finish_run(request(tmp_path), [ends[0], other], parts)


def test_every_kind_of_request_has_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and files fork, and are tested with what forks them."""
    monkeypatch.setattr(answerer, "num_gpus", lambda: 3)
    monkeypatch.setattr(answerer, "measure_closeness", lambda asked: asked.bound)
    monkeypatch.setattr(answerer, "compare_bits", lambda asked: asked.name)
    made = Answerer(lambda event: None)
    folders = {"reference": tmp_path / "a", "candidate": tmp_path / "b"}
    assert made.answer(MachineRequest()) == Machine(gpus=3)
    assert made.answer(ClosenessRequest(**folders, bound=0.5)) == 0.5
    assert made.answer(BitsRequest(**folders, name="output")) == "output"


def test_a_rank_that_places_parameters_otherwise_is_named_and_systems_that_say_nothing_agree() -> None:
    refuse_other_placements(["ab", "ab", "ab"])
    refuse_other_placements([None, None])
    with pytest.raises(RankError) as error:
        refuse_other_placements(["ab", "ab", "cd", "cd"])
    assert error.value.rank == 2
    assert str(error.value) == (
        "RankError: rank 2 placed parameters otherwise than rank 0\n  expected: placement_sha256 ab\n  found: cd"
    )
    with pytest.raises(RankError, match="rank 1 placed"):
        refuse_other_placements(["ab", None])
