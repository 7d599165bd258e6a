"""What a recording's manifest says of a graph, and which programs the host keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.chunking import transformer_batch
from harness import host
from harness.case import Case
from harness.devices import Placement
from harness.graph.options import GraphOptions
from harness.host import Host, RunRequest, join_recording
from harness.localize.replay import Replay

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


def request(tmp_path: Path, **values: Any) -> RunRequest:
    return RunRequest(
        **{
            "case": transformer_batch,
            "system": "graph",
            "arm": "first",
            "placement": Placement(),
            "out": tmp_path / "out",
            "logs": tmp_path / "logs",
            "work": tmp_path / "work",
            "timeout": 1.0,
            "case_timeout": 1.0,
            **values,
        }
    )


def test_a_manifest_has_the_ordered_passes_with_their_settings_and_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = []
    monkeypatch.setattr(host, "join_parts", lambda out, manifest, parts, values: manifests.append(manifest))
    for seconds in (0.1, 0.2):
        graph = {"code_hash": "c", "passes": [p | {"seconds": seconds} for p in PASSES], "seconds": {"trace": seconds}}
        join_recording(request(tmp_path), graph, [{"determinism": {}, "system": {}}], [], [])
    assert manifests[0]["graph"] == {
        "code_hash": "c",
        "passes": [{"name": "clean_up", "settings": {}}, {"name": "chunk", "settings": {"dim": "batch"}}],
    }
    assert json.dumps(manifests[0]) == json.dumps(manifests[1])


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, GraphOptions]]:
    """What the host prepared; a program is its number."""
    calls: list[tuple[Case, GraphOptions]] = []

    def prepare(case: Case, device: torch.device, options: GraphOptions) -> int:
        calls.append((case, options))
        return len(calls)

    monkeypatch.setattr(host, "prepare_program", prepare)
    monkeypatch.setattr(host, "describe_program", lambda program: None)
    return calls


def test_a_program_is_kept_for_the_same_passes_and_made_anew_for_others(
    tmp_path: Path, prepared: list[tuple[Case, GraphOptions]]
) -> None:
    own = Host(lambda event: None)
    plain, extra = (request(tmp_path, graph_options=GraphOptions(extra_passes=texts)) for texts in ((), ("a:b",)))
    assert [own._prepare(each) for each in (plain, plain, extra, extra, plain)] == [1, 1, 2, 2, 3]
    assert [options.extra_passes for _, options in prepared] == [(), ("a:b",), ()]


def test_a_control_run_takes_the_dumped_program_without_dumping_it_again(
    tmp_path: Path, prepared: list[tuple[Case, GraphOptions]]
) -> None:
    own = Host(lambda event: None)
    first = request(tmp_path, graph_options=GraphOptions(dump_dir=tmp_path))
    assert [own._prepare(each) for each in (first, replace(first, arm="control", graph_options=GraphOptions()))] == [
        1,
        1,
    ]


def test_values_are_kept_once_as_chosen_or_all_where_the_case_states_a_bound(tmp_path: Path) -> None:
    chosen = request(tmp_path, values=("0/*",))
    assert chosen.values_to_keep == ("0/*",)
    assert request(tmp_path).values_to_keep == ()
    close = replace(transformer_batch, expected="CLOSE", close_within=0.1)
    assert request(tmp_path, case=close, values=("0/*",)).values_to_keep == ("*",)
    assert replace(chosen, arm="control").values_to_keep == ()
    assert replace(chosen, replay=Replay(step=0)).values_to_keep == ()


def test_a_manifest_says_which_values_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = []
    monkeypatch.setattr(host, "join_parts", lambda out, manifest, parts, values: manifests.append(manifest))
    join_recording(request(tmp_path, values=("0/*",)), None, [{"determinism": {}, "system": {}}], [], [])
    assert manifests[0]["values"] == ["0/*"]
