"""Verified causes of random programs with one wrong call; tests/benchmarks/blame_programs.py runs more of them."""

from __future__ import annotations

import pytest

from tests.harness.localize.programs import WIDE, WIDEST, WITH_DETOURS, generate
from tests.harness.localize.verified_programs import verified


@pytest.mark.parametrize("first", [10_000, WIDE, WIDEST, WITH_DETOURS + 20_000, WITH_DETOURS + 1_001_480])
def test_a_cause_is_verified_and_right_where_values_show_which_call_is_wrong(first: int) -> None:
    scenes = [scene for seed in range(first, first + 60) if (scene := generate(seed)) is not None]
    found = {scene.seed: verified(scene) for scene in scenes}
    reported = {seed: each.verification.status for seed, each in found.items() if each.verification is not None}
    wrong = [scene.seed for scene in scenes if scene.is_determined() and not found[scene.seed].is_right]
    assert [seed for seed in wrong if reported.get(seed) == "verified"] == []
    assert len(wrong) <= len(scenes) * 0.03
    assert sum(status == "verified" for status in reported.values()) >= len(scenes) * 0.9
    assert sum(each.place for each in found.values()) >= len(scenes) * 0.93


def test_a_program_s_seed_gives_the_same_logs_each_time() -> None:
    first, again = generate(3), generate(3)
    assert first is not None and again is not None and first.candidate.calls == again.candidate.calls


def test_what_a_candidate_does_otherwise_changes_no_value() -> None:
    for seed in (*range(20_000, 20_060), *range(WITH_DETOURS, WITH_DETOURS + 60)):
        scene = generate(seed)
        assert scene is None or scene.right.shown == scene.reference.shown
