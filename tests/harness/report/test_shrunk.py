"""What is told of a case that was made smaller. The file itself is run by the tests of the command."""

from __future__ import annotations

from bitproof.harness.report.shrunk import tell_shrunk


def test_settings_stand_below_one_another_with_what_it_took() -> None:
    assert tell_shrunk([("layers", 4, 1), ("world_size", 16, 2)], 7, 41.6) == [
        "shrunk in 7 tries, 42 s:",
        "  layers       4 -> 1",
        "  world_size  16 -> 2",
    ]


def test_a_case_that_is_as_small_as_it_can_be_is_told_as_such() -> None:
    assert tell_shrunk([], 3, 1.2) == ["nothing could be left out: 3 tries, 1 s"]
