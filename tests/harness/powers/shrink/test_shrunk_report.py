"""What is told of a case that was made smaller. The file itself is run by the tests of the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bitproof
from bitproof.harness.powers.shrink.shrunk_report import describe_shrinking, own_systems_script
from bitproof.harness.records import Divergence
from tests.harness.reports import case, result


def test_settings_stand_below_one_another_with_what_it_took() -> None:
    assert describe_shrinking([("layers", 4, 1), ("world_size", 16, 2)], 7, 41.6) == [
        "shrunk in 7 tries, 42 s:",
        "  layers       4 -> 1",
        "  world_size  16 -> 2",
    ]


def test_a_case_that_is_as_small_as_it_can_be_is_reported_as_such() -> None:
    assert describe_shrinking([], 3, 1.2) == ["nothing could be left out: 3 tries, 1 s"]


def test_a_file_of_two_systems_of_a_users_holds_the_case_and_the_files_that_are_given_whatever_stands_in_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(case("mine", expected="DIFFERENT", differs=("grad",)), reference="mine.py:plain")
    mine = replace(mine, candidate="/there/mine.py:other")
    found = result(mine, "DIFFERENT", first_divergence=Divergence(step=0, rank=0, kind="grad", name='"""\\x'))
    texts, names = {"mine.py": 'A = """\\n"""', "p/q.py": ""}, {"mine.py:plain": "mine.py:plain"}
    text = own_systems_script(mine, found, "bitproof run --case case.json", ["pass.py:f"], texts, names, ["torch 9"])
    held: dict[str, Any] = {"__name__": "held"}
    exec(compile(text, "mine.py", "exec"), held)
    ran: dict[str, Any] = {}
    report = SimpleNamespace(exit_status=1)
    monkeypatch.setattr(
        bitproof, "run", lambda case, **options: ran.update(options, case=case) or SimpleNamespace(report=report)
    )
    assert held["main"](str(tmp_path)) == 1
    kept = ran["case"]
    assert (kept.reference, kept.candidate) == (f"{tmp_path}/mine.py:plain", "/there/mine.py:other")
    assert (kept.expected, kept.differs, kept.steps) == ("EQUAL", (), mine.steps)
    assert ran["extra_passes"] == [f"{Path.cwd()}/pass.py:f"] and '"""\\x' in held["__doc__"]
    assert {name: (tmp_path / name).read_text().strip() for name in texts} == texts
    assert "It needs torch 9." in held["__doc__"]
