"""Which calls of an EQUAL candidate the reference does not answer for, on logs written by hand."""

from __future__ import annotations

from bitproof.harness.localize.calls import Call, Place
from bitproof.harness.localize.strangers import Stranger, find_strangers

FORWARD = Place("layers.0", "forward")


def call(text: str) -> Call:
    """`mm a b -> c`."""
    left, right = text.split(" -> ")
    operator, *inputs = left.split()
    return Call(FORWARD, operator, tuple(inputs), tuple(right.split()))


STEP = [call("mm x w -> a"), call("silu a -> b"), call("sum b -> l")]


def test_a_candidate_whose_values_the_reference_had_all_has_no_strangers() -> None:
    found = find_strangers([STEP], [STEP], 1)
    assert found.found == []
    assert str(found) == "--deep: each of 3 calls of step 1 gave values that the reference had too"


def test_a_value_that_a_later_call_swallows_is_told_with_its_ranks() -> None:
    swallowed = [STEP[0], call("silu a -> B"), call("sum B -> l")]
    found = find_strangers([STEP, STEP], [swallowed, swallowed], 0)
    assert found.found == [Stranger("silu of layers.0 (forward)", 2, 2)]
    assert str(found) == (
        "--deep: 2 of 6 calls of step 0 gave values that the reference never had: "
        "silu of layers.0 (forward) x 2 on 2 ranks"
    )


def test_what_only_packs_right_values_is_counted_apart_and_what_packs_wrong_ones_is_told() -> None:
    packed = [*STEP[:2], call("cat a b -> P"), call("view P -> Q"), STEP[2]]
    found = find_strangers([STEP], [packed], 0)
    assert (found.found, found.packing) == ([], 2)
    assert "5 calls of step 0, 2 that only pack right values aside, gave values" in str(found)
    [stranger] = find_strangers([STEP], [[STEP[0], call("cat a Z -> P"), *STEP[1:]]], 0).found
    assert stranger.call == "cat of layers.0 (forward)"


def test_what_packs_is_told_where_the_reference_packs_the_same_in_another_way() -> None:
    packs = [*STEP[:2], call("cat a b -> P"), call("sum P -> l")]
    assert find_strangers([packs], [packs], 0).found == []
    [stranger] = find_strangers([packs], [[*STEP[:2], call("cat a b -> Q"), call("sum P -> l")]], 0).found
    assert stranger.call == "cat of layers.0 (forward)"
    assert find_strangers([packs], [[*STEP[:2], call("cat b a -> Q"), call("sum P -> l")]], 0).packing == 1


def test_beyond_twenty_strangers_are_counted() -> None:
    many = [call(f"op{i} x -> V{i}") for i in range(25)]
    assert str(find_strangers([STEP], [[*STEP, *many]], 0)).endswith("op19 of layers.0 (forward) x 1; and 5 more")
