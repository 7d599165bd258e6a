"""Which calls of an EQUAL candidate the reference does not answer for, on logs written by hand."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.unmatched_calls import UnmatchedCall, describe_packing, find_unmatched, listed, summed_up

FORWARD = CallSite("layers.0", "forward")


def call(text: str) -> Call:
    """`mm a b -> c`."""
    left, right = text.split(" -> ")
    operator, *inputs = left.split()
    return Call(FORWARD, operator, tuple(inputs), tuple(right.split()))


STEP = [call("mm x w -> a"), call("silu a -> b"), call("sum b -> l")]


def strange(reference: list[Call], candidate: list[Call]) -> list[str]:
    """The operators of the candidate's calls that gave what the reference never had."""
    return [candidate[index].operator for index in find_unmatched(reference, candidate).unmatched]


def test_a_candidate_whose_values_the_reference_had_all_has_no_strangers() -> None:
    assert find_unmatched(STEP, STEP) == ([], [])


def test_a_value_that_a_later_call_swallows_is_reported_with_its_ranks() -> None:
    swallowed = [STEP[0], call("silu a -> B"), call("sum B -> l")]
    assert strange(STEP, swallowed) == ["silu"]
    found = summed_up([(0, swallowed[1]), (1, swallowed[1])])
    assert found == [UnmatchedCall("silu of layers.0 (forward)", 2, 2)]
    assert listed(found) == "silu of layers.0 (forward) x 2 on 2 ranks"


def test_what_only_packs_right_values_is_counted_apart_and_what_packs_wrong_ones_is_reported() -> None:
    packed = [*STEP[:2], call("cat a b -> P"), call("view P -> Q"), STEP[2]]
    assert find_unmatched(STEP, packed) == ([], [2, 3])
    assert describe_packing(2) == ", except 2 that only pack right values," and describe_packing(0) == ""
    assert strange(STEP, [STEP[0], call("cat a Z -> P"), *STEP[1:]]) == ["cat"]


def test_what_packs_is_reported_where_the_reference_packs_the_same_in_another_way() -> None:
    packs = [*STEP[:2], call("cat a b -> P"), call("sum P -> l")]
    assert find_unmatched(packs, packs) == ([], [])
    assert strange(packs, [*STEP[:2], call("cat a b -> Q"), call("sum P -> l")]) == ["cat"]
    assert find_unmatched(packs, [*STEP[:2], call("cat b a -> Q"), call("sum P -> l")]).packing == [2]


def test_a_number_that_is_read_out_of_a_right_tensor_is_right_although_eager_reads_it_by_no_operator() -> None:
    assert find_unmatched(STEP, [*STEP, call("_local_scalar_dense b -> number5")]) == ([], [])
    assert strange(STEP, [*STEP, call("_local_scalar_dense Z -> number5")]) == ["_local_scalar_dense"]


def test_beyond_twenty_strangers_are_counted() -> None:
    many = [call(f"op{i} x -> V{i}") for i in range(25)]
    assert len(strange(STEP, [*STEP, *many])) == 25
    assert listed(summed_up([(0, x) for x in many])).endswith("op19 of layers.0 (forward) x 1; and 5 more")
