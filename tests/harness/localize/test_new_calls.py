"""What was put between two calls, or before one of them, in logs written by hand."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Place
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog
from bitproof.harness.localize.new_calls import put_before, put_between
from tests.harness.localize.logs.test_candidate_log import FORWARD, ROUTER, STEP, call, logged


def test_what_was_put_between_two_calls_is_found_where_the_second_is_made_of_another_value() -> None:
    between = logged(STEP[0], call("mul c -> Z", ROUTER, 0), call("add_ n Z -> M", FORWARD, None, 1), STEP[2])
    assert between.reference.counterpart(1, between) == 2 and put_between(between, 1, 2) == 1
    without = logged(STEP[0], STEP[2])
    assert without.reference.counterpart(1, without) is None, "the call is not made at all"
    assert put_between(logged(*STEP), 1, 1) is None


def test_what_one_call_alone_reads_was_put_before_that_one_and_what_all_read_was_put_after_a_call() -> None:
    doubled = call("mul c -> C", ROUTER, 0)
    before = logged(STEP[0], doubled, call("add_ n C -> M", FORWARD, None, 1), STEP[2])
    assert put_before(before, 1) == before.log[2]
    two_steps = [doubled, call("cast C -> E", ROUTER, 1), call("add_ n E -> M", FORWARD, None, 2)]
    assert put_before(logged(STEP[0], *two_steps, STEP[2]), 1) == two_steps[2]
    after = logged(STEP[0], doubled, call("add_ n C -> M", FORWARD, None, 1), call("exchange C -> D", ROUTER, 1))
    assert put_before(after, 1) is None


def test_a_product_with_ones_is_another_value_than_what_it_reads_though_their_bits_agree() -> None:
    step = [call("norm x -> c", ROUTER), call("mul w c -> c", ROUTER, None, 0), call("add_ n c -> m", FORWARD, None, 1)]
    changed = [*step[:2], call("mul c -> C", FORWARD, 1), call("add_ n C -> M", ROUTER, None, 2)]
    assert put_before(CandidateLog(changed, ReferenceLog([*step[:2], step[2]._replace(place=ROUTER)])), 2) is None


def test_what_calls_of_two_modules_read_was_put_before_none_of_them() -> None:
    """A residual that is rounded for the next block is read by its norm and by its sum."""
    norm, layer = Place("layers.1.norm", "forward"), Place("layers.1", "forward")
    step = [call("add x f -> h"), call("mul h -> n", norm, 0), call("add h n -> y", layer, 0, 1)]
    step.append(call("mul h -> g", Place("layers.0", "backward"), 0))
    narrow = call("cast h -> H", FORWARD, 0)
    norm_alone = [step[0], narrow, call("mul H -> N", norm, 1), call("add h N -> Y", layer, 0, 2), step[3]]
    assert put_before(CandidateLog(norm_alone, ReferenceLog(step)), 1) == norm_alone[2]
    both = [step[0], narrow, call("mul H -> N", norm, 1), call("add H N -> Y", layer, 1, 2), step[3]]
    assert put_before(CandidateLog(both, ReferenceLog(step)), 1) is None


def test_what_adds_to_a_value_that_nobody_else_reads_was_put_after_what_gave_it() -> None:
    """A gradient of an activation's input, added up there, though it is not read as it was anywhere."""
    layer, up = Place("layers.1", "backward"), Place("layers.1.up", "backward")
    step = [call("gelu_backward g x -> b", layer), call("mm b w -> d", up, 0)]
    changed = [step[0], call("add b g -> B", layer, 0), call("mm B w -> D", up, 1)]
    assert put_before(CandidateLog(changed, ReferenceLog(step)), 1) is None
