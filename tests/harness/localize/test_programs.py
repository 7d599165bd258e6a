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
    assert sum(each.operator for each in found.values()) >= len(scenes) * 0.9


@pytest.mark.parametrize(
    "seed",
    [
        14_000_774,
        14_007_126,
        14_008_145,
        14_017_096,
        14_018_959,
        11_001_874,
        14_001_934,
        14_000_144,
        16_000_407,
        16_002_285,
    ],
)
def test_a_call_is_exchanged_with_the_value_that_its_readers_should_read(seed: int) -> None:
    scene = generate(seed)
    assert scene is not None
    found = verified(scene)
    assert found.is_right and found.verification is not None and found.verification.status == "verified"


@pytest.mark.parametrize("seed", [18_002_166, 18_003_755])
def test_a_bucket_in_another_order_is_found_behind_extra_copies_of_its_parts(seed: int) -> None:
    scene = generate(seed)
    assert scene is not None
    found = verified(scene)
    assert found.is_right and found.verification is not None and found.verification.status == "verified"


def test_a_cause_whose_wrong_value_another_exchange_only_hides_is_kept() -> None:
    scene = generate(14_012_910)
    assert scene is not None
    found = verified(scene)
    assert found.is_right and found.verification is not None and found.verification.status == "verified"


def test_a_program_s_seed_gives_the_same_logs_each_time() -> None:
    first, again = generate(3), generate(3)
    assert first is not None and again is not None and first.candidate.calls == again.candidate.calls


def test_what_a_candidate_does_otherwise_changes_no_value() -> None:
    for seed in (*range(20_000, 20_060), *range(WITH_DETOURS, WITH_DETOURS + 60)):
        scene = generate(seed)
        assert scene is None or scene.right.shown == scene.reference.shown
