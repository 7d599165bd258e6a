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


def test_of_several_calls_with_a_record_s_value_that_at_the_place_of_a_missing_producer_comes_first() -> None:
    """Backward computes a value again, and the record is of the forward, where the producer is missing."""
    again = call("div a b -> c")._replace(place=CallSite("layers.0", "backward"))
    reference = ReferenceLog([call("div a b -> c"), call("mul c -> d", 0), again])
    assert CandidateLog([call("div a b -> c"), again], reference).producer("d", "c") == 0


def test_a_call_that_leaves_a_record_s_value_unchanged_has_not_produced_it_though_it_is_at_the_producer_s_place() -> (
    None
):
    """An optimizer counts a gradient as written; the gradient lacks a sum that the reference makes in the update."""
    local, place = call("mm x y -> g", None), CallSite(None, "update")
    joined = [local, call("add g h -> j", 0, None)._replace(place=place)]
    update = call("_fused_adamw_ p g -> q g", None, 0)._replace(place=place)
    assert CandidateLog([local, update], ReferenceLog(joined)).producer("j", "g") == 0


def test_a_part_of_a_split_is_right_though_the_split_matches_the_slice_of_another_part() -> None:
    slices = [call(f"slice x -> {part}", None)._replace(view=True) for part in "ab"]
    log = CandidateLog([call("split x -> a b", None)._replace(view=True)], ReferenceLog(slices))
    assert log.matching_call(0) == 0 and log.is_as_matched(0, "b")
    wrong = CandidateLog([call("split x -> a B", None)._replace(view=True)], ReferenceLog(slices))
    assert not wrong.is_as_matched(0, "B")


def test_the_summands_of_two_sums_correspond_by_the_calls_that_compute_them() -> None:
    parts = [call("mm x v -> a", None), call("mm y v -> b", None)]
    reference = ReferenceLog([*parts, call("add a b -> c", 0, 1)])
    candidate = [call("mm x v -> A", None), call("mm y v -> B", None), call("add B A -> C", 1, 0)]
    assert [*CandidateLog(candidate, reference).differing_inputs(2, 2)] == [(0, 1), (1, 0)]
