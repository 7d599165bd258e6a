"""Sums in another grouping, on logs written by hand."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.localize.partial_sums import regrouped
from tests.harness.localize.test_blame import call

REFERENCE = [call("add a b -> p"), call("add p c -> s")]


def whole(candidate: list[Call], index: int) -> Call | None:
    return regrouped(CandidateLog(candidate, ReferenceLog(REFERENCE)), candidate[index])


def test_a_partial_sum_of_another_grouping_belongs_to_the_sum_that_adds_the_same_up() -> None:
    assert whole([call("add b c -> Q"), call("add a Q -> S")], 0) == REFERENCE[1]


def test_a_sum_of_other_summands_belongs_to_none() -> None:
    assert whole([call("add b d -> Q"), call("add a Q -> S")], 0) is None


def test_what_is_no_sum_is_not_regrouped() -> None:
    assert whole([call("sub b c -> Q"), call("sub a Q -> S")], 0) is None
