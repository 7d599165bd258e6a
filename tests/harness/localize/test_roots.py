"""Which of several roots comes first: one that joins another's wrong value may be another way to right values."""

from __future__ import annotations

from bitproof.harness.localize.culprit import Culprit
from tests.harness.localize.test_blame import blamed, call

REFERENCE = [call("neg x -> b"), call("sum b -> s"), call("add a s -> c"), call("mm c w -> d")]


def blamed_of(*texts: str) -> Culprit:
    culprit = blamed(REFERENCE, [call(text) for text in texts], "D")
    assert culprit is not None
    return culprit


def test_a_root_that_alone_makes_wrong_what_a_call_of_the_reference_reads_comes_before_an_earlier_one() -> None:
    culprit = blamed_of("neg x -> b", "tanh a -> T", "drop b -> B", "sum B -> S", "sub T a S -> C", "mm C w -> D")
    assert culprit.call.operator == "drop"


def test_of_roots_that_meet_before_any_call_of_the_reference_the_first_is_blamed() -> None:
    culprit = blamed_of("neg x -> b", "sum b -> s", "tanh a -> T", "drop s -> S", "sub T a S -> C", "mm C w -> D")
    assert culprit.call.operator == "tanh"
