"""What a system does to the switches that keep its run repeatable, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.capture.store import read_manifest
from harness.case.case_file import case_text
from harness.cli import main
from harness.machine.determinism import first_changed, read_switches, tell_changes
from tests.harness.execute.test_launch import toy

SET = {"mkldnn_enabled": True, "num_threads": 1}
OFF = SET | {"mkldnn_enabled": False}


def readings(*found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(zip(("set", "after_factory", "after_steps"), found, strict=True))


def test_a_switch_that_stays_as_it_was_set_is_not_told() -> None:
    assert list(tell_changes(readings(SET, SET, SET))) == []


def test_a_switch_is_told_with_what_it_was_what_it_is_and_where_it_was_changed() -> None:
    assert list(tell_changes(readings(SET, OFF, OFF))) == ["mkldnn_enabled True -> False by its factory"]
    assert list(tell_changes(readings(SET, SET, OFF))) == ["mkldnn_enabled True -> False in its steps"]


def test_the_lowest_rank_that_changed_a_switch_stands_for_all() -> None:
    same, changed = readings(SET, SET, SET), readings(SET, OFF, OFF)
    assert first_changed([same, changed]) is changed
    assert first_changed([same, same]) is same


def test_the_switches_are_plain_values() -> None:
    assert json.loads(json.dumps(read_switches())) == read_switches()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_host: None) -> Any:
    def run(candidate: str, *options: str) -> tuple[list[str], Path]:
        file = tmp_path / "case.json"
        file.write_text(case_text(replace(toy(candidate), steps=1)))
        main(["run", "--case", str(file), "--report-dir", str(tmp_path / "out"), "--no-control", *options])
        return capsys.readouterr().out.splitlines(), tmp_path / "out" / "latest"

    return run


@pytest.mark.ranks
def test_a_system_that_changes_switches_is_told_and_every_reading_stands_in_its_manifest(run: Any) -> None:
    lines, folder = run("Loose")
    told = (
        "candidate tests.harness.toy_systems:Loose changed switches that bitproof had set: "
        "deterministic_algorithms True -> False by its factory, mkldnn_enabled True -> False in its steps"
    )
    assert f"toy: {told}" in lines
    [result] = json.loads((folder / "report.json").read_text())["cases"]
    assert (result["verdict"], result["remarks"]) == ("EQUAL", [told])
    for page in ("report.md", "report.html"):
        assert "changed switches that bitproof had set" in (folder / page).read_text()
    [loose, steady] = sorted((folder / "recordings" / "toy").iterdir())
    found = read_manifest(loose).switches
    names = ("deterministic_algorithms", "mkldnn_enabled")
    assert [[found[when][name] for name in names] for when in ("set", "after_factory", "after_steps")] == [
        [True, True],
        [False, True],
        [False, False],
    ]
    kept = read_manifest(steady).switches
    assert kept["set"] == kept["after_factory"] == kept["after_steps"]


@pytest.mark.ranks
def test_a_call_that_asks_for_graphs_of_systems_that_have_none_is_told_that_there_are_none(run: Any) -> None:
    lines, folder = run("steady", "--dump-graphs")
    system = "tests.harness.toy_systems:steady"
    assert (
        "toy: --dump-graphs wrote nothing: only the passes of the systems graph, joint, autoplace are known, "
        "and neither "
        f"{system} nor {system} is among them"
    ) in lines
    assert not (folder / "graphs").exists()
