"""One rank's calls beside the reference's, written by hand: what was put between two calls, or before one of them."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.reference_log import ReferenceLog

FORWARD = Place("layers.0", "forward")
ROUTER = Place("layers.0.router", "forward")


def call(text: str, place: Place = FORWARD, *producers: int | None) -> Call:
    """`mm a b -> c`."""
    left, right = text.split(" -> ")
    operator, *inputs = left.split()
    return Call(place, operator, tuple(inputs), tuple(right.split()), producers=producers)


STEP = [call("sum x -> c", ROUTER), call("add_ n c -> m", FORWARD, None, 0), call("exchange c -> d", ROUTER, 0)]


def logged(*calls: Call) -> CandidateLog:
    return CandidateLog(calls, ReferenceLog(STEP))


def test_what_was_put_between_two_calls_is_found_where_the_second_is_made_of_another_value() -> None:
    between = logged(STEP[0], call("mul c -> Z", ROUTER, 0), call("add_ n Z -> M", FORWARD, None, 1), STEP[2])
    assert between.reference.counterpart(1, between) == 2 and between.put_between(1, 2) == 1
    without = logged(STEP[0], STEP[2])
    assert without.reference.counterpart(1, without) is None, "the call is not made at all"
    assert logged(*STEP).put_between(1, 1) is None


def test_what_one_call_alone_reads_was_put_before_that_one_and_what_all_read_was_put_after_a_call() -> None:
    doubled = call("mul c -> C", ROUTER, 0)
    before = logged(STEP[0], doubled, call("add_ n C -> M", FORWARD, None, 1), STEP[2])
    assert before.put_before(1) == before.log[2]
    two_steps = [doubled, call("cast C -> E", ROUTER, 1), call("add_ n E -> M", FORWARD, None, 2)]
    assert logged(STEP[0], *two_steps, STEP[2]).put_before(1) == two_steps[2]
    after = logged(STEP[0], doubled, call("add_ n C -> M", FORWARD, None, 1), call("exchange C -> D", ROUTER, 1))
    assert after.put_before(1) is None


def test_a_product_with_ones_is_another_value_than_what_it_reads_though_their_bits_agree() -> None:
    step = [call("norm x -> c", ROUTER), call("mul w c -> c", ROUTER, None, 0), call("add_ n c -> m", FORWARD, None, 1)]
    changed = [*step[:2], call("mul c -> C", FORWARD, 1), call("add_ n C -> M", ROUTER, None, 2)]
    assert CandidateLog(changed, ReferenceLog([*step[:2], step[2]._replace(place=ROUTER)])).put_before(2) is None


def test_what_calls_of_two_modules_read_was_put_before_none_of_them() -> None:
    """A residual that is rounded for the next block is read by its norm and by its sum."""
    norm, layer = Place("layers.1.norm", "forward"), Place("layers.1", "forward")
    step = [call("add x f -> h"), call("mul h -> n", norm, 0), call("add h n -> y", layer, 0, 1)]
    step.append(call("mul h -> g", Place("layers.0", "backward"), 0))
    narrow = call("cast h -> H", FORWARD, 0)
    norm_alone = [step[0], narrow, call("mul H -> N", norm, 1), call("add h N -> Y", layer, 0, 2), step[3]]
    assert CandidateLog(norm_alone, ReferenceLog(step)).put_before(1) == norm_alone[2]
    both = [step[0], narrow, call("mul H -> N", norm, 1), call("add H N -> Y", layer, 1, 2), step[3]]
    assert CandidateLog(both, ReferenceLog(step)).put_before(1) is None


def test_what_reads_parts_of_one_bucket_alone_comes_of_its_collective() -> None:
    bucket = [
        call("cat x c -> P", FORWARD),
        call("reduce P -> Q", FORWARD, 0)._replace(collective=True),
        call("split Q -> Q1 Q2", FORWARD, 1)._replace(view=True),
        call("view Q1 -> m", FORWARD, 2)._replace(view=True),
        call("view Q2 -> d", FORWARD, 2)._replace(view=True),
        call("add m d -> A", FORWARD, 3, 4),
        call("add m c -> B", FORWARD, 3, None),
    ]
    assert logged(*bucket).bucket_of(5) == 1
    assert logged(*bucket).bucket_of(6) is None, "one of its inputs is no part"
    plain = [call("sum x -> c"), call("exchange c -> d", FORWARD, 0)._replace(collective=True)]
    plain.append(call("add d d -> D", FORWARD, 1, 1))
    assert logged(*plain).bucket_of(2) is None, "the reference exchanges that value, too"
    again = [bucket[1]._replace(inputs=("x",), outputs=("P",)), bucket[1], call("add Q Q -> D", FORWARD, 1, 1)]
    assert logged(*again).bucket_of(2) is None, "what a collective gave is no bucket for the next"


def test_more_calls_of_an_operator_than_the_reference_makes_in_a_module_are_extra_whatever_their_chunks() -> None:
    first, second = (FORWARD._replace(chunk=chunk) for chunk in (0, 1))
    reference = ReferenceLog([call("add a b -> c", first), call("add d e -> f", second)])
    joined = CandidateLog([call("add a b -> c"), call("add d e -> f", second)], reference)
    assert not joined.is_extra(0) and not joined.is_extra(1)
    assert CandidateLog([*joined.log, call("add c c -> C", second)], reference).is_extra(2)
