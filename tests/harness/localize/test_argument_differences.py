"""In what two calls are unlike, in words; what gave another input is tested in test_blame."""

from __future__ import annotations

from bitproof.harness.localize.argument_differences import argument_differences, input_differences
from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.culprit import call_of
from bitproof.harness.localize.logs.calls import CallSite
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from tests.harness.localize.test_blame import call


def test_numbers_that_differ_are_reported_with_the_reference_s() -> None:
    mine = call("norm x -> A")._replace(scalars=(("eps", "0.1"), ("dim", "1")))
    assert argument_differences(mine, mine._replace(scalars=(("eps", "0.2"), ("dim", "1")))) == (
        "eps=0.1 where the reference has 0.2"
    )
    assert argument_differences(mine, mine) == ""


def test_nothing_is_reported_of_inputs_that_are_the_same() -> None:
    log = [call("mm x w -> a"), call("sum a -> l")]
    assert input_differences(CandidateLog(log, ReferenceLog(log)), 1, 1) == ""


def test_a_parameter_that_a_fused_update_leaves_out_is_reported_with_how_many_its_lists_have() -> None:
    update = CallSite(None, "update")
    reference = [call("_fused_adamw_ p g -> q", update), call("_fused_adamw_ r h -> s", update)]
    culprit = find_culprit([reference], [reference[:1]], {0: [("s", "r")]})
    assert culprit is not None and (culprit.how, culprit.reference) == ("lacks", 1)
    assert str(call_of(culprit).how).endswith(", with 1 of the reference's 2 tensors in its lists")
    other = [call("adamw p g -> q", update), call("adamw r h -> s", update)]
    culprit = find_culprit([other], [other[:1]], {0: [("s", "r")]})
    assert culprit is not None and culprit.arguments == ""
