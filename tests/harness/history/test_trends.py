from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.history.database import Night, Outcome
from bitproof.harness.history.trends import changes_of, trends_of
from bitproof.harness.records import Verdict


def outcome(name, verdict="EQUAL", seconds=10.0, as_expected=None):
    good = verdict == "EQUAL" if as_expected is None else as_expected
    return Outcome(name, "toys", Verdict(verdict), "EQUAL", good, seconds, 1, 0, "")


def nights(*columns, environments=()):
    """A night a column; each has outcomes."""
    days = count(1)
    environments = environments or [{}] * len(columns)
    return [
        Night(f"202601{next(days):02d}T030405Z-abcdef", 0, environment, {o.name: o for o in column})
        for column, environment in zip(columns, environments, strict=True)
    ]


def trend(*verdicts, seconds=()):
    """The trend of one case; None is a night on which it was not run."""
    seconds = seconds or [10.0] * len(verdicts)
    columns = [[outcome("a", v, s)] if v else [] for v, s in zip(verdicts, seconds, strict=True)]
    [found] = trends_of(nights(*columns))
    return found


@pytest.mark.parametrize(
    ("verdicts", "flakes", "good", "unsure", "since"),
    [
        (["EQUAL"], 0, 1, 0, 1),
        (["EQUAL"] * 5, 0, 1, 0, 1),
        (["EQUAL", "DIFFERENT", "EQUAL", "DIFFERENT", "EQUAL"], 1, 0.6, 0, 5),
        (["EQUAL", "EQUAL", "DIFFERENT", "DIFFERENT", "DIFFERENT"], 0.25, 0.4, 0, 3),
        (["NONDETERMINISTIC", "ERROR", "UNVERIFIED", "EQUAL", "EQUAL"], 0.75, 0.4, 0.6, 4),
        (["EQUAL", None, "EQUAL", None, "DIFFERENT"], 0.5, 2 / 3, 0, 5),
        ([None, "EQUAL", None, "EQUAL", None], 0, 1, 0, 2),
    ],
)
def test_flakes_are_turns_from_one_night_to_the_next(verdicts, flakes, good, unsure, since):
    found = trend(*verdicts)
    assert (found.flake_rate, found.unsure, found.since.time.day) == (flakes, unsure, since)
    assert found.as_expected == pytest.approx(good)
    assert len(found.outcomes) == sum(verdict is not None for verdict in verdicts)


HERE = {"commit": "c0ffee", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("environments", "flaky"),
    [
        ([HERE, HERE, HERE], [2, 3]),
        ([HERE, HERE | {"torch": "2.14.1"}, HERE], None),
        ([HERE, HERE | {"commit": "f00"}, HERE], None),
        ([{}, {}, {}], None),
        ([HERE | {"commit": "c0ffee-dirty"}] * 3, None),
        ([HERE, HERE, HERE | {"commit": "f00"}], [1, 2]),
    ],
    ids=["same", "other torch", "other commit", "no commit", "files changed since", "later"],
)
def test_two_results_of_one_commit_in_one_environment_are_flaky_whatever_comes_later(environments, flaky):
    columns = [[outcome("a", verdict)] for verdict in ("EQUAL", "DIFFERENT", "EQUAL")]
    found, *others = trends_of(nights(*columns, environments=environments))
    assert len(others) == len({each.get("torch") for each in environments}) - 1
    assert (found.flaky and [night.time.day for night in found.flaky]) == flaky


def test_the_newest_two_results_are_told():
    columns = [[outcome("a", verdict)] for verdict in ("EQUAL", "DIFFERENT", "DIFFERENT", "EQUAL", "EQUAL")]
    [found] = trends_of(nights(*columns, environments=[HERE] * 5))
    assert [night.time.day for night in found.flaky] == [3, 4]


def test_a_difference_in_other_kinds_than_expected_is_a_turn():
    columns = [[outcome("a", "DIFFERENT", as_expected=good)] for good in (True, False, False)]
    [found] = trends_of(nights(*columns))
    assert (found.flake_rate, found.since.time.day) == (0.5, 2)


def test_a_case_has_a_trend_for_each_pair_of_systems_in_each_environment_the_last_to_run_first():
    def ran(candidate):
        return [replace(outcome("a"), reference="eager", candidate=candidate)]

    old, new = {"torch": "2.13.0", "commit": "a"}, {"torch": "2.14.1", "commit": "b"}
    found = trends_of(nights(ran("graph"), ran("graph"), ran("joint"), environments=[old, new, new]))
    assert [each.label for each in found] == [
        "a (eager / joint, torch 2.14.1)", "a (eager / graph, torch 2.14.1)", "a (eager / graph, torch 2.13.0)",
    ]  # fmt: skip
    assert [[each is not None for each in trend.by_night] for trend in found] == [
        [False, False, True], [False, True, False], [True, False, False],
    ]  # fmt: skip
    [plain] = trends_of(nights([outcome("a")], ran("graph")))
    assert (plain.label, len(plain.outcomes)) == ("a", 2), "an older night's systems are those of later ones"


def test_slower_compares_the_last_night_with_the_median_of_those_before():
    found = trend(*["EQUAL"] * 4, seconds=[10.0, 100.0, 12.0, 18.0])
    assert (found.median_seconds, found.slower) == (12.0, 1.5)
    assert (trend("EQUAL").median_seconds, trend("EQUAL").slower) == (None, None)
    assert trend("EQUAL", "EQUAL", seconds=[0.0, 1.0]).slower is None


def test_cases_stand_in_the_newest_nights_order_and_those_it_lacks_come_last():
    found = trends_of(nights([outcome("old"), outcome("a"), outcome("b")], [outcome("b"), outcome("a")]))
    assert [entry.name for entry in found] == ["b", "a", "old"]


def test_cases_are_selected_by_name_and_family():
    days = nights([outcome("moe_seq"), outcome("moe_batch"), outcome("whole")])
    assert [entry.name for entry in trends_of(days, "moe and not seq")] == ["moe_batch"]
    assert len(trends_of(days, "toys")) == len(trends_of(days, " ")) == 3
    with pytest.raises(UsageError) as error:
        trends_of(days, "nope")
    assert (error.value.expected, error.value.found) == ("one of moe_seq, moe_batch, whole", "-k 'nope'")


@pytest.mark.parametrize("days", [[], nights([])])
def test_an_empty_history_is_told(days):
    with pytest.raises(UsageError) as error:
        trends_of(days)
    assert error.value.fix is not None and "`bitproof history add RUN_DIR`" in error.value.fix


def test_changes_of_the_machine_are_told_and_those_of_the_commit_are_not():
    environments = [
        {"torch": "2.12", "commit": "a", "cpu": "x"},
        {"torch": "2.13", "commit": "b", "cpu": "x"},
        {"torch": {"1/2": "2.13", "2/2": "2.14"}, "commit": "c", "gpu": "\x1b[2J" + "long" * 20},
    ]
    assert [str(change) for change in changes_of(nights([], [], [], environments=environments))] == [
        "2026-01-02: torch 2.12 -> 2.13",
        "2026-01-03: torch 2.13 -> none",
        "2026-01-03: cpu x -> none",
        "2026-01-03: torch.1/2 none -> 2.13",
        "2026-01-03: torch.2/2 none -> 2.14",
        f"2026-01-03: gpu none -> \\x1b[2J{'long' * 13}l...",
    ]
