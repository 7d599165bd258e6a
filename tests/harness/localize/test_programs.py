"""Whom blame finds in random programs with one wrong call: see `programs`, and tests/benchmarks/blame_programs.py."""

from __future__ import annotations

import pytest

from tests.harness.localize.programs import WIDE, WIDEST, WITH_DETOURS, answer, generate


@pytest.mark.parametrize("first", [10_000, WIDE, WIDEST, WITH_DETOURS + 20_000])
def test_the_planted_call_is_named_where_values_tell_and_nobody_is_from_whom_nothing_leads_to_the_record(
    first: int,
) -> None:
    scenes = [scene for seed in range(first, first + 60) if (scene := generate(seed)) is not None]
    answers = [answer(scene) for scene in scenes]
    problems = {scene.seed: told for scene, (_, told) in zip(scenes, answers, strict=True)}
    assert {seed: told for seed, told in problems.items() if told not in ("", "undetermined")} == {}
    assert sum(told == "" for told in problems.values()) > len(scenes) * 0.8


def test_a_program_s_seed_gives_the_same_logs_each_time() -> None:
    first, again = generate(3), generate(3)
    assert first is not None and again is not None and first.candidate.calls == again.candidate.calls


def test_what_a_candidate_does_otherwise_changes_no_value() -> None:
    for seed in (*range(20_000, 20_060), *range(WITH_DETOURS, WITH_DETOURS + 60)):
        scene = generate(seed)
        assert scene is None or scene.right.shown == scene.reference.shown
