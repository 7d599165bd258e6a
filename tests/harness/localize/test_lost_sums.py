"""Sums over ranks that are missing, or that no call reads, on logs written by hand. All ranks have the same terms."""

from __future__ import annotations

import pytest

from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import Culprit, call_of
from bitproof.harness.localize.logs.calls import Call
from tests.harness.localize.test_blame import BACKWARD, call, logged


def summed(text: str) -> Call:
    return call(f"allreduce_ {text}", BACKWARD, collective=True)


def div(text: str, other: int) -> Call:
    return call(f"div.Tensor {text}", BACKWARD)._replace(scalars=(("other", str(other)),))


def blamed(
    reference: list[Call], candidate: list[Call], beside: list[Call] | None = None, *, others: list[Call] | None = None
) -> Culprit | None:
    """Rank 0's cause, where rank 1's logs are the same or others."""
    return find_culprit([reference, beside or reference], [candidate, others or candidate], {0: [("r", "R")]}, None)


FIRST = call("mul x w -> g", BACKWARD)
MEAN = logged([(), (0,), (1,), (2,)], [FIRST, summed("g -> s"), div("s -> g", 2), div("g -> r", 8)])
"""Over two ranks the sum of g is 2 g, and half of that is g again."""
UNSUMMED = logged([(), (0,), (1,)], [FIRST, div("g -> H", 2), div("H -> R", 8)])


def test_a_sum_of_equal_terms_that_is_missing_is_blamed_and_not_the_number_of_what_follows() -> None:
    culprit = blamed(MEAN, UNSUMMED)
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("lacks", None, 1)
    assert call_of(culprit).how == "is missing from the candidate"
    assert culprit.chain[0].call == MEAN[1]


@pytest.mark.parametrize(
    "other", [summed("w -> v"), call("all_to_all w -> v", BACKWARD, collective=True)], ids=["as many", "another"]
)
def test_a_sum_that_is_taken_elsewhere_is_not_missing(other: Call) -> None:
    culprit = blamed(MEAN, [*UNSUMMED, other])
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 1)


def test_a_sum_whose_terms_are_not_there_is_not_missing() -> None:
    other = logged([(), (0,), (1,)], [FIRST, summed("q -> s"), div("s -> g", 2)])
    reference = [*other, div("g -> r", 8)._replace(producers=(2,))]
    culprit = blamed(reference, UNSUMMED)
    assert culprit is not None and culprit.how == "computes"


def test_a_missing_sum_of_terms_that_differ_is_not_looked_for() -> None:
    """What reads a rank's own term in place of the sum then reads what the reference never reads there."""
    other = logged(
        [(), (0,), (1,), (2,)],
        [call("mul y w -> h", BACKWARD), summed("h -> s"), div("s -> g", 2), div("g -> r", 8)],
    )
    lacking = logged([(), (0,), (1,)], [call("mul y w -> h", BACKWARD), div("h -> J", 2), div("J -> R", 8)])
    culprit = blamed(MEAN, UNSUMMED, other, others=lacking)
    assert culprit is not None and culprit.how == "computes"


VIEWED = logged(
    [(), (0,), (1,), (2,)],
    [FIRST, summed("g -> s"), call("view s -> t", BACKWARD)._replace(view=True), call("mm t w -> r", BACKWARD)],
)


def test_a_sum_that_no_call_reads_is_blamed_and_not_the_new_view_of_its_terms() -> None:
    candidate = logged(
        [(), (0,), (0,), (2,)],
        [FIRST, summed("g -> s"), call("_unsafe_view g -> U", BACKWARD), call("mm U w -> R", BACKWARD)],
    )
    culprit = blamed(VIEWED, candidate)
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("discards", 1, 1)
    assert call_of(culprit).how == "has an output that the reference reads and no call here does"
    read = [*candidate, call("neg s -> n", BACKWARD)._replace(producers=(1,))]
    culprit = blamed(VIEWED, read)
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 2)
