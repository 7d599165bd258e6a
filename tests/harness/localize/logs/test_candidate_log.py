"""One rank's calls beside the reference's, written by hand: buckets, and calls too many."""

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
