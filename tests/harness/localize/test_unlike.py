"""In what two calls are unlike, in words; what gave another input is tested in test_blame."""

from __future__ import annotations

from bitproof.harness.localize.candidate_log import CandidateLog
from bitproof.harness.localize.reference_log import ReferenceLog
from bitproof.harness.localize.unlike import unlike_arguments, unlike_input
from tests.harness.localize.test_blame import call


def test_numbers_that_differ_are_told_with_the_reference_s() -> None:
    mine = call("norm x -> A")._replace(scalars=(("eps", "0.1"), ("dim", "1")))
    assert unlike_arguments(mine, mine._replace(scalars=(("eps", "0.2"), ("dim", "1")))) == (
        "eps=0.1 where the reference has 0.2"
    )
    assert unlike_arguments(mine, mine) == ""


def test_nothing_is_told_of_inputs_that_are_the_same() -> None:
    log = [call("mm x w -> a"), call("sum a -> l")]
    assert unlike_input(CandidateLog(log, ReferenceLog(log)), 1, 1) == ""
