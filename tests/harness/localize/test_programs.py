"""Whom blame finds in random programs with one wrong call: see `programs`, and tests/benchmarks/blame_programs.py."""

from __future__ import annotations

import pytest

from tests.harness.localize.programs import WIDE, WIDEST, WITH_DETOURS, answer, generate

UNDETERMINED = "undetermined", "undetermined and untold"

MENDED = (
    110044338,
    90029852,
    90050894,
    15,
    62,
    85,
    93,
    155,
    156,
    214,
    275,
    305,
    324,
    395,
    442,
    506,
    564,
    565,
    581,
    646,
    744,
    808,
    976,
    1079,
    2093,
    2178,
    400402,
    403165,
    404499,
    501542,
    501980,
    700654,
    701735,
    706327,
    707416,
    707748,
    710456,
    711272,
    720775,
    721790,
    2028758,
    2031235,
    2039311,
    5000055,
    7006117,
    7012499,
    7017421,
    10000060,
    10000301,
    10000646,
    10000720,
    10000772,
    10000784,
    10000944,
    10001231,
    10002059,
    10002197,
    10002650,
    10002656,
    10102294,
    10103477,
    10106166,
    10106377,
    20004705,
    20004790,
    50010314,
    70024359,
    70060853,
)
"""Programs on which blame once named another call, or one that nothing leads from."""

TOLD = (
    80016483,
    80023113,
    80028076,
    80035129,
    80036867,
    80057824,
    80066424,
    80069361,
    80074166,
    80074467,
    80082262,
    80088696,
    90003967,
    90021995,
    90023914,
    90026148,
    90048320,
    90053715,
    90101076,
    90102223,
    91101839,
    91203608,
    91206690,
    110007504,
    110010617,
    110035202,
    110044778,
    110048728,
    110073818,
    110088622,
    120001754,
    130011827,
    160023179,
    160032941,
    160035188,
    160062503,
)
"""Programs in which values do not tell, and whose answer once lacked the planted call."""


@pytest.mark.parametrize("seed", TOLD)
def test_an_answer_has_the_planted_call_where_values_do_not_tell(seed: int) -> None:
    scene = generate(seed)
    assert scene is not None and answer(scene)[1] in ("", UNDETERMINED[0])


@pytest.mark.parametrize("seed", MENDED)
def test_what_was_once_blamed_wrong_is_blamed_rightly(seed: int) -> None:
    scene = generate(seed)
    if scene is not None:
        assert answer(scene)[1] in ("", *UNDETERMINED)


@pytest.mark.parametrize("first", [10_000, WIDE, WIDEST, WITH_DETOURS + 20_000])
def test_the_planted_call_is_named_where_values_tell_and_nobody_is_from_whom_nothing_leads_to_the_record(
    first: int,
) -> None:
    scenes = [scene for seed in range(first, first + 60) if (scene := generate(seed)) is not None]
    answers = [answer(scene) for scene in scenes]
    problems = {scene.seed: told for scene, (_, told) in zip(scenes, answers, strict=True)}
    assert {seed: told for seed, told in problems.items() if told not in ("", *UNDETERMINED)} == {}
    assert sum(told == "" for told in problems.values()) > len(scenes) * 0.8
    assert sum(told == UNDETERMINED[1] for told in problems.values()) <= len(scenes) * 0.02
    assert sum(bool(culprit and culprit.or_else) for culprit, told in answers if told == "") < len(scenes) * 0.2


def test_a_program_s_seed_gives_the_same_logs_each_time() -> None:
    first, again = generate(3), generate(3)
    assert first is not None and again is not None and first.candidate.calls == again.candidate.calls


def test_what_a_candidate_does_otherwise_changes_no_value() -> None:
    for seed in (*range(20_000, 20_060), *range(WITH_DETOURS, WITH_DETOURS + 60)):
        scene = generate(seed)
        assert scene is None or scene.right.shown == scene.reference.shown
