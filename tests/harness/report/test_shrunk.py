"""What is told of a case that was made smaller. The file itself is run by the tests of the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.records import Divergence
from bitproof.harness.report.shrunk import tell_own_systems, tell_shrunk
from tests.harness.reports import case, result


def test_settings_stand_below_one_another_with_what_it_took() -> None:
    assert tell_shrunk([("layers", 4, 1), ("world_size", 16, 2)], 7, 41.6) == [
        "shrunk in 7 tries, 42 s:",
        "  layers       4 -> 1",
        "  world_size  16 -> 2",
    ]


def test_a_case_that_is_as_small_as_it_can_be_is_told_as_such() -> None:
    assert tell_shrunk([], 3, 1.2) == ["nothing could be left out: 3 tries, 1 s"]


def test_a_file_of_two_systems_of_a_users_holds_the_case_with_whole_paths_whatever_stands_in_its_head() -> None:
    mine = replace(case("mine", expected="DIFFERENT", differs=("grad",)), reference="mine.py:plain")
    mine = replace(mine, candidate="/there/mine.py:other")
    found = result(mine, "DIFFERENT", first_divergence=Divergence(step=0, rank=0, kind="grad", name='"""\\x'))
    text = tell_own_systems(mine, found, "bitproof run --case case.json", ["pass.py:f"])
    held: dict[str, object] = {"__name__": "held"}
    exec(compile(text, "mine.py", "exec"), held)
    kept = Case.from_dict(held["CASE"])  # type: ignore[arg-type]
    assert (kept.reference, kept.candidate) == (f"{Path.cwd()}/mine.py:plain", "/there/mine.py:other")
    assert (kept.expected, kept.differs, kept.steps) == ("EQUAL", (), mine.steps)
    assert "extra_passes=('pass.py:f',)" in text and '"""\\x' in str(held["__doc__"])
