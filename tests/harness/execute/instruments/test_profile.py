"""What a profile shows of a run, and how ranks' files become one trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitproof.harness.execute.instruments.profile import join_profiles, phase, profiled, showing_digests
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from tests.harness.execute.test_launch import toy, toy_folder


def names_in(trace: dict[str, Any], pid: int | None = None) -> set[str]:
    return {e["name"] for e in trace["traceEvents"] if e["ph"] != "M" and pid in (None, e["pid"])}


@pytest.mark.ranks
def test_a_profiled_run_leaves_one_trace_with_phases_digests_and_collectives_of_every_rank(
    tmp_path: Path, one_host: None
) -> None:
    [result] = run_cases([toy()], RunOptions(device="cpu", control="never", profile=True), tmp_path)
    assert result.verdict == "EQUAL"
    trace = json.loads((tmp_path / "profile" / "toy.json").read_text())
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    side = toy_folder("steady")
    assert [*processes.values()] == [f"{side}{role} rank {rank}" for role in ("", ".candidate") for rank in range(2)]
    phases = {"join groups", "make system", "step 0", "step 3", "wait for all ranks", "digest loss loss"}
    for pid in processes:
        assert phases <= names_in(trace, pid)
        assert any("allgather" in name for name in names_in(trace, pid)), "a collective"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_is_not_profiled_leaves_no_trace(tmp_path: Path) -> None:
    list(run_cases([toy()], RunOptions(device="cpu", control="never"), tmp_path))
    assert not (tmp_path / "profile").exists()


def test_a_profile_names_phases_and_digests(tmp_path: Path) -> None:
    seen: list[Any] = []
    with profiled(tmp_path / "rank0.json"), phase("step 0"):
        showing_digests(lambda *reported: seen.append(reported))("grad", "weight", torch.ones(2) + 1)
    assert [reported[:2] for reported in seen] == [("grad", "weight")]
    assert {"step 0", "digest grad weight", "aten::add"} <= names_in(json.loads((tmp_path / "rank0.json").read_text()))


def test_nothing_is_written_without_a_file_or_its_folder_or_when_the_block_raises(tmp_path: Path) -> None:
    with profiled(None):
        pass
    with profiled(tmp_path / "elsewhere" / "rank0.json"):
        pass
    with pytest.raises(ValueError, match="no"), profiled(tmp_path / "rank0.json"):
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []


def test_joined_traces_share_a_clock_and_keep_what_is_the_ranks_own(tmp_path: Path) -> None:
    def write(rank: int, pid: int, base: int) -> Path:
        events = [
            {"ph": "M", "name": "process_name", "pid": pid, "ts": 1.0, "args": {"name": "python"}},
            {"ph": "X", "cat": "user_annotation", "name": "step 0", "pid": pid, "tid": pid, "ts": 5.0, "dur": 2.0},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler", "pid": "Spans", "tid": 0, "ts": 4.0, "dur": 9.0},
        ]
        file = tmp_path / f"rank{rank}.json"
        file.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": base}))
        return file

    join_profiles({"graph rank 0": write(0, 77, 1000), "graph rank 1": write(1, 78, 4000)}, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"] == [
        (0, "graph rank 0"),
        (1, "graph rank 1"),
    ]
    assert [(e["pid"], e["name"], e["ts"]) for e in events if e["ph"] == "X"] == [
        (0, "step 0", 0.0),
        (1, "step 0", 3.0),
    ]
