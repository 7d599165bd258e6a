from __future__ import annotations

import pytest

from bitproof.harness.errors import CaseError, PassError, RecordingError, UsageError
from bitproof.harness.records import Score
from bitproof.harness.report.status import error_status, exit_status, worst


@pytest.mark.parametrize(
    ("verdict", "expected", "status"),
    [
        ("EQUAL", "EQUAL", 0),
        ("DIFFERENT", "DIFFERENT", 0),
        ("DIFFERENT", "EQUAL", 1),
        ("EQUAL", "DIFFERENT", 1),
        ("NONDETERMINISTIC", "EQUAL", 1),
        ("NONDETERMINISTIC", "DIFFERENT", 1),
        ("UNVERIFIED", "EQUAL", 3),
        ("ERROR", "DIFFERENT", 3),
    ],
)
def test_a_case_has_the_status_of_its_verdict(make_result, verdict, expected, status):
    assert exit_status([make_result(verdict=verdict, expected=expected)]) == status


def test_a_difference_in_other_kinds_than_the_case_says_is_not_as_expected(make_result):
    result = make_result(verdict="DIFFERENT", expected="DIFFERENT", differing_kinds=("loss", "grad", "param"))
    assert exit_status([result]) == 1


def test_the_worst_case_wins(make_result):
    good, bad, lost = make_result(), make_result(verdict="DIFFERENT"), make_result(verdict="UNVERIFIED")
    assert exit_status([good, bad]) == 1
    assert exit_status([bad, lost, good]) == 3


def test_no_result_at_all_was_not_judged_unless_it_is_an_empty_shard():
    assert exit_status([]) == 3
    assert exit_status([], is_shard=True) == 0


def test_a_shard_with_cases_is_judged_by_them(make_result):
    assert exit_status([make_result(verdict="UNVERIFIED")], is_shard=True) == 3


@pytest.mark.parametrize(
    ("score", "status"),
    [
        (Score(faults=2, killed=2, equivalents=1), 0),
        (Score(faults=2, killed=1), 1),
        (Score(faults=2, killed=2, equivalents=1, flagged=1), 1),
        (Score(faults=2, killed=1, unjudged=1), 3),
        (Score(faults=2, killed=2, ended_early=True), 3),
        (Score(places=(0, 2), faults=2, killed=2), 0),
    ],
)
def test_a_fault_that_survived_counts_like_a_case_that_is_not_as_expected(make_result, score, status):
    assert exit_status([make_result()], faults=score) == status
    assert exit_status([make_result(verdict="UNVERIFIED")], faults=score) == 3, "and covers no case"


def test_the_order_from_worst_to_best_is_2_3_1_0():
    assert [worst(statuses) for statuses in ([0, 1, 3, 2], [0, 1, 3], [0, 1], [0])] == [2, 3, 1, 0]
    assert worst([0, 139]) == 3


def test_a_wrong_call_is_2_and_any_other_error_3():
    assert [error_status(error("x")) for error in (UsageError, CaseError, PassError, RecordingError)] == [2, 2, 3, 3]
