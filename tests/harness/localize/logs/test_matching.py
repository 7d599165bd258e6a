"""Which calls of two logs match: by origin first, by value second, by order last."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.logs.matching import Matching

FORWARD = CallSite("layers.0", "forward")
CHUNK_0, CHUNK_1 = (FORWARD._replace(chunk=chunk) for chunk in (0, 1))


def call(text: str, place: CallSite = FORWARD, *producers: int | None) -> Call:
    """`mm a b -> c`."""
    left, right = text.split(" -> ")
    operator, *inputs = left.split()
    return Call(place, operator, tuple(inputs), tuple(right.split()), producers=producers)


def matches(reference: list[Call], candidate: list[Call]) -> list[int | None]:
    return Matching(candidate, reference).theirs


def test_calls_of_one_origin_that_changed_places_match_by_their_inputs() -> None:
    reference = [call("mm x w -> a"), call("mm y w -> b")]
    assert matches(reference, [call("mm y w -> B"), call("mm x w -> a")]) == [1, 0]


def test_calls_of_equal_number_match_in_order_though_they_share_no_value() -> None:
    reference = [call("silu a -> c"), call("silu b -> d")]
    assert matches(reference, [call("silu A -> C"), call("silu B -> D")]) == [0, 1]


def test_no_call_matches_one_of_the_other_chunk_and_a_call_without_a_chunk_matches_either() -> None:
    reference = [call("mm x w -> a", CHUNK_0), call("mm y w -> b", CHUNK_1)]
    assert matches(reference, [call("mm y w -> b", CHUNK_0)]) == [0]
    assert matches(reference, [call("mm y w -> b")]) == [1]


def test_a_call_that_returns_its_input_takes_no_part_in_the_order_of_those_that_compute() -> None:
    reference = [call("div x w -> a"), call("div y v -> b")]
    assert matches(reference, [call("div Z v -> B"), call("div q -> q")]) == [1, None]


def test_an_extra_call_among_others_matches_none() -> None:
    reference = [call("mul x -> a"), call("mul a -> b")]
    assert matches(reference, [reference[0], call("mul a -> z"), call("mul z -> B")]) == [0, 1, None]


def test_unequally_many_calls_match_by_their_numbers_and_by_the_operators_before_them() -> None:
    def view(text: str, size: str, maker: int) -> Call:
        return call(text, FORWARD, maker)._replace(scalars=(("size", size),))

    reference = [call("mm x -> a"), call("silu x -> b"), view("view a -> c", "4", 0), view("view b -> d", "8", 1)]
    candidate = [call("mm x -> A"), call("silu x -> B"), view("view B -> D", "8", 1)]
    assert matches(reference, candidate) == [0, 1, 3]


def test_a_slice_matches_the_split_that_takes_the_same_part() -> None:
    split = call("split a -> b c")._replace(view=True)
    assert matches([split], [call("slice a -> c")._replace(view=True)]) == [0]


def test_a_collective_of_a_bucket_matches_none_of_single_values() -> None:
    reference = [call("neg x -> a"), call("reduce a -> r", FORWARD, 0)._replace(collective=True)]
    bucket = [call("neg x -> a"), call("cat a b -> P"), call("reduce P -> Q", FORWARD, 1)._replace(collective=True)]
    assert matches(reference, bucket) == [0, None, None]
    assert matches(bucket, bucket) == [0, 1, 2]


def test_a_call_of_a_later_step_matches_none_of_an_earlier_one() -> None:
    """An extra count in the first step gives the value that the reference counts in the second."""
    update = CallSite(None, "update")

    def step(*counts: str) -> list[Call]:
        return [*(call(f"add_ {text}") for text in counts), call("sgd p -> p", update)]

    reference = [*step("0 -> 1"), *step("1 -> 2")]
    assert matches(reference, [*step("0 -> 1", "1 -> 2"), *step("2 -> 3")]) == [0, 2, 1, 2, 3]
    assert Matching([*step("0 -> 1", "1 -> 2"), *step("2 -> 3")], reference).mine == [0, 2, 3, 4]


def test_a_draw_matches_none_of_another_module() -> None:
    other = CallSite("layers.1", "forward")
    reference = [call("rand s -> m t")._replace(draws=True)]
    assert matches(reference, [call("rand s -> m t", other)._replace(draws=True)]) == [None]


def test_a_call_that_reads_a_wrong_input_matches_by_the_call_that_reads_its_output() -> None:
    """`silu x` is made twice, and the second stands for `silu a`: both share no value, but the sum reads them."""
    nowhere, there = CallSite(None, None), CallSite("layers.1", "forward")
    reference = [
        call("silu x -> b"),
        call("mm x w -> a"),
        call("silu a -> c", there, 1),
        call("sum b c -> l", there, 0, 2),
    ]
    candidate = [
        call("silu x -> b", nowhere),
        call("mm x w -> a", nowhere),
        call("silu x -> B", nowhere, None),
        call("sum b B -> L", nowhere, 0, 2),
    ]
    assert matches(reference, candidate) == [0, 1, 2, 3]


def test_a_call_with_a_wrong_input_matches_though_its_reader_reads_more_than_its_match() -> None:
    reference = [call("gather a -> b"), call("mm x w -> y"), call("div b y -> c", FORWARD, 0, 1)]
    candidate = [
        call("gather W -> B"),
        call("mm x w -> y"),
        call("sin B -> D", FORWARD, 0),
        call("div D B y -> C", FORWARD, 2, 0, 1),
    ]
    nowhere = CallSite(None, None)
    placed = [each._replace(place=nowhere) for each in candidate]
    assert matches(reference, placed) == [0, 1, None, 2]
    twice = [*placed[:3], call("gather V -> E", nowhere), call("div B E y -> C", nowhere, 0, 3, 1)]
    assert matches(reference, twice) == [None, 1, None, None, 2], "which of two is not known"


def test_a_bucket_of_three_tensors_is_no_wrong_version_of_a_sequence_s_two_chunks() -> None:
    reference = [call("cat a b -> c")]
    assert matches(reference, [call("cat p q r -> P")]) == [None]
    assert matches(reference, [call("cat A B -> C")]) == [0]
    assert matches(reference, [call("cat a B e -> C")]) == [0], "a part is too many"


def test_a_stage_that_sends_a_gradient_begins_no_new_step() -> None:
    """From the second micro-batch on, the candidate reads the activation of the one before."""
    backward, update = CallSite("layers.0", "backward"), CallSite(None, "update")

    def stage(sends: CallSite, *values: str) -> list[Call]:
        found = list[Call]()
        for number, value in enumerate(values, 1):
            calls = [call(f"mm {value} w -> {value}w"), call(f"mul {value}w g{number} -> s{number}{value}", backward)]
            calls += [call(f"send s{number}{value} -> s{number}{value}", sends)]
            found += [each._replace(micro_batch=number) for each in calls]
        return found

    assert matches(stage(update, "a", "b", "c"), stage(backward, "a", "a", "b"))[::3] == [0, 3, 6]


def test_a_recomputed_node_matches_what_its_first_run_matches_though_another_call_is_more_alike() -> None:
    reference = [call("mm x w -> a"), call("copy a -> b"), call("copy w -> v")]
    first, again = call("copy a -> b")._replace(node="copy_7"), call("copy A -> B")._replace(node="copy_7_recomputed_1")
    assert matches(reference, [reference[0], first, call("mm X w -> A"), again]) == [0, 1, None, 1]
    assert Matching([reference[0], first, call("mm X w -> A"), again], reference).repeated == {1}


def test_a_recomputed_node_repeats_the_run_of_its_own_micro_batch() -> None:
    def run(text: str, micro_batch: int, node: str | None = None) -> Call:
        return call(text)._replace(micro_batch=micro_batch, node=node)

    reference = [run("silu a -> b", 1), run("silu c -> d", 2)]
    candidate = [run("silu a -> b", 1, "silu_1"), run("silu c -> d", 2, "silu_1")]
    candidate += [run("silu A -> B", 1, "silu_1_recomputed"), run("silu C -> D", 2, "silu_1_recomputed")]
    assert matches(reference, candidate) == [0, 1, 0, 1]


def test_messages_of_micro_batches_match_though_one_system_first_sends_a_shape() -> None:
    def receive(made: str, direction: str, micro_batch: int | None) -> Call:
        place = CallSite("", direction)
        return call(f"recv_ e -> {made}", place)._replace(collective=True, peers=(1, 0), micro_batch=micro_batch)

    reference = [receive("shape", "forward", None), receive("a", "forward", 2), receive("b", "backward", 2)]
    assert matches(reference, [receive("A", "backward", 1), receive("B", "backward", 2)]) == [1, 2]


def test_a_call_behind_a_cast_that_only_one_system_makes_matches_by_what_is_cast() -> None:
    reference = [call("index x -> a"), call("view a -> b", FORWARD, 0)]
    reference += [call("index y -> c"), call("view c -> d", FORWARD, 2)]
    candidate = [call("index y -> c"), call("cast c -> C", FORWARD, 0), call("view C -> D", FORWARD, 1)]
    candidate += [call("index x -> a"), call("cast a -> A", FORWARD, 3), call("view A -> B", FORWARD, 4)]
    assert matches(reference, candidate) == [2, None, 3, 0, None, 1]


def test_of_calls_with_equal_values_those_match_that_read_matching_calls() -> None:
    """Two layers compute the same; the candidate's first is wrong in its second call."""
    layer = [
        call("index x -> a"),
        call("view a -> b", FORWARD, 0),
        call("index x -> a"),
        call("view a -> b", FORWARD, 2),
    ]
    wrong = [layer[0], call("view A -> B", FORWARD, 0), *layer[2:]]
    assert matches(layer, wrong) == [0, 1, 2, 3]


def test_calls_of_the_reference_that_compute_the_same_have_one_match_though_that_is_wrong() -> None:
    reference = [call("gather p -> w", CHUNK_0), call("t w -> v", CHUNK_0, 0)]
    reference += [call("gather p -> w", CHUNK_1), call("t w -> v", CHUNK_1, 2), call("mm x v -> y", CHUNK_1, None, 3)]
    candidate = [call("bucket p -> W"), call("t W -> V", FORWARD, 0), call("mm x V -> Y", CHUNK_1, None, 1)]
    matching = Matching(candidate, reference)
    assert (matching.theirs, matching.mine) == ([None, 3, 4], [None, 1, None, 1, 2])
