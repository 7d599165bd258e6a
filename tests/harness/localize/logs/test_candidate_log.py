"""One rank's calls beside the reference's, written by hand."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog

FORWARD = CallSite("layers.0", "forward")


def call(text: str, *producers: int | None) -> Call:
    """`mm a b -> c`."""
    left, right = text.split(" -> ")
    operator, *inputs = left.split()
    return Call(FORWARD, operator, tuple(inputs), tuple(right.split()), producers=producers)


STEP = [call("t w -> v")._replace(view=True), call("mm x v -> a", None, 0), call("silu a -> b", 1)]


def logged(*calls: Call) -> CandidateLog:
    return CandidateLog(calls, ReferenceLog(STEP))


def test_a_call_differs_if_its_output_is_not_its_match_s_and_an_extra_one_if_it_is_nowhere() -> None:
    log = logged(*STEP[:2], call("silu a -> B", 1), call("neg a -> b", 1), call("neg a -> C", 1))
    assert [log.differs(index) for index in range(5)] == [False, False, True, False, True]


def test_a_view_of_a_wrong_value_from_before_the_step_has_no_maker() -> None:
    log = logged(call("t W -> V", None)._replace(view=True), call("mm x V -> A", None, 0))
    assert log.producer_of_input(1, 1) is None and log.input_producers(1) == (None, 0)
    wrong_part = logged(call("t w -> V", None)._replace(view=True), call("mm x V -> A", None, 0))
    assert wrong_part.producer_of_input(1, 1) == 0, "the view takes another part of a right value"


def test_of_several_calls_with_a_record_s_value_the_match_of_its_producer_gave_it() -> None:
    zeros = [call("zeros -> z"), call("mul x -> z")]
    log = CandidateLog([call("mul y -> z"), call("mul x -> z"), call("zeros -> z")], ReferenceLog(zeros[1:]))
    assert log.producer("z", "z") == 1
