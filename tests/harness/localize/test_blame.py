"""Which call is blamed, on logs written by hand. A value is written as a letter; a capital one is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bitproof.harness.localize import blame
from bitproof.harness.localize.chain import Pair
from bitproof.harness.localize.culprit import Culprit, call_of
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.localize.search import held_as
from bitproof.harness.records import Key, Manifest, Record, Recording
from tests.harness.localize.written_logs import with_producers

FORWARD = CallSite("layers.0", "forward")
BACKWARD = CallSite("layers.0", "backward")


def call(text: str, place: CallSite = FORWARD, *, collective: bool = False) -> Call:
    """`mm a b -> c`."""
    left, right = text.split(" -> ")
    operator, *inputs = left.split()
    return Call(place, operator, tuple(inputs), tuple(right.split()), collective=collective)


def find_culprit(
    reference: Sequence[Sequence[Call]],
    candidate: Sequence[Sequence[Call]],
    differing: Mapping[int, Iterable[Pair]],
    first: tuple[int, Pair] | None = None,
) -> Culprit | None:
    """The culprit of logs that are written by hand, rank by rank."""
    sides = [[with_producers(calls) for calls in side] for side in (reference, candidate)]
    culprit = blame.find_culprit(sides[0], sides[1], differing, first)
    if culprit is None:
        return None
    # As it was written: tests compare it with a call of theirs.
    written = (reference if culprit.candidate is None else candidate)[culprit.rank][culprit.index]
    return replace(culprit, call=culprit.call._replace(producers=written.producers))


def blamed(reference: list[Call], candidate: list[Call], *differing: str) -> Culprit | None:
    """The culprit on a single rank. A tensor that differs has the name in capitals that it should have in small."""
    return find_culprit([reference], [candidate], {0: [(name.lower(), name) for name in differing]})


def logged(given: list[tuple[int | None, ...]], calls: list[Call]) -> list[Call]:
    """The calls, each with what gave its inputs."""
    return [each._replace(producers=by) for each, by in zip(calls, given, strict=True)]


STEP = [call("mm x w -> a"), call("silu a -> b"), call("sum b -> l"), call("mul b g -> d", BACKWARD)]


def test_logs_that_agree_have_no_culprit() -> None:
    assert blamed(STEP, STEP, "d") is None


def test_the_first_call_whose_output_differs_is_blamed_and_not_those_that_read_it() -> None:
    candidate = [STEP[0], call("silu a -> B"), call("sum B -> L"), call("mul B g -> D", BACKWARD)]
    culprit = blamed(STEP, candidate, "D", "L")
    assert culprit == Culprit(how="computes", call=candidate[1], ranks=(0,), candidate=1, reference=1)


def test_a_graph_of_kernels_is_blamed_with_its_first_output_that_the_reference_does_not_have() -> None:
    graph = call("graph x w -> a B")._replace(operator="graph 000-forward", scalars=(("0", "mm"), ("1", "silu")))
    culprit = blamed(STEP, [graph, call("sum B -> L")], "L")
    assert culprit is not None
    assert (culprit.how, culprit.candidate, culprit.reading) == ("compiles", 0, "output 1 of 2, silu")
    assert blamed(STEP, [graph._replace(outputs=("a", "b")), call("sum b -> L")], "L").how == "computes"


def test_a_call_that_was_given_another_good_value_is_blamed_with_its_turn_s_partner() -> None:
    candidate = [STEP[0], call("silu x -> B"), call("sum B -> L")]
    culprit = blamed(STEP, candidate, "L")
    assert culprit is not None
    assert (culprit.how, culprit.candidate, culprit.reference) == ("reads", 1, 1)


def test_a_call_that_reads_another_good_value_says_what_gave_it_and_what_gave_its_partner_s() -> None:
    near = CallSite("layers.0.w1", "forward")
    reference = [call("mm x w -> a", near), call("t a -> v")._replace(view=True, producers=(0,))]
    reference += [call("neg x -> b"), call("silu v -> c")._replace(producers=(1,)), call("sum c -> l")]
    candidate = [*reference[:3], call("silu b -> C")._replace(producers=(2,)), call("sum C -> L")]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None
    assert culprit.reading == (
        "the output of neg of layers.0 (forward), where the reference has the output of mm of layers.0.w1 (forward)"
    )
    assert call_of(culprit).how == f"reads different inputs, each correct by itself: {culprit.reading}"
    candidate[3] = call("silu x -> C")._replace(producers=(None,))
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None and culprit.reading.startswith("an input of the step, where the reference has")


def test_an_extra_call_is_not_inserted_where_its_value_is_wrong_if_another_call_rightly_reads_it() -> None:
    """The reference computes c by `sub x b`, and the candidate by two calls, of which the second reads b."""
    reference = [call("mm x w -> b"), call("sub x b -> c"), call("silu c -> d"), call("tanh b -> e")]
    candidate = [call("mm x w -> b"), call("sub x -> H"), call("add H x b -> c"), call("silu c -> d")]
    culprit = blamed(reference, [*candidate, call("tanh c -> E")], "E")
    assert culprit is not None
    assert (culprit.how, culprit.call.operator) == ("reads", "tanh")


def test_an_extra_call_stands_for_one_of_two_calls_that_compute_a_value_if_the_other_one_is_here() -> None:
    reference = [call("exp a -> b"), call("view a -> v")._replace(view=True), call("exp v -> b")]
    reference += [call("mul b w -> c"), call("neg x -> n")]
    candidate = [call("my_exp x -> Q"), reference[1], call("my_exp v -> b"), call("mul Q w -> C"), reference[4]]
    culprit = blamed(reference, candidate, "C")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 0)
    # If the reference computes it once, the call that reads another value is wrong.
    culprit = blamed(reference[1:], candidate, "C")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("reads", 3)


def test_summands_that_are_grouped_otherwise_are_read_otherwise() -> None:
    near, layer = CallSite("layers.0.wo", "forward"), CallSite("layers.0", "forward")
    reference = [call("mm x w -> a", near), call("add x a -> h", layer), call("mm h w -> f", near)]
    reference += [call("add h f -> y", layer), call("sum y -> l")]
    candidate = [*reference[:3], call("add a f -> S", near), call("add x S -> Y", near), call("sum Y -> L")]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None
    assert (culprit.how, culprit.candidate) == ("reads", 3)
    once_more = [*reference[:4], call("add y a -> Z", near), call("sum Z -> L")]
    culprit = blamed(reference, once_more, "L")
    assert culprit is not None and (culprit.how, culprit.call.place) == ("adds", near)


def test_what_a_call_read_that_gives_a_right_value_by_a_wrong_way_is_blamed() -> None:
    """A sum of which one summand was made zero is the sum so far, which the reference had, too."""
    reference = [call("mul x -> a"), call("mul y -> b"), call("add x a -> s"), call("add s b -> l")]
    candidate = [*reference[:3], call("mul b -> Z"), call("add s Z -> s")]
    culprit = find_culprit([reference], [candidate], {0: [("l", "s")]})
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 3)


def test_a_wrong_value_that_fills_a_right_tensor_is_no_part_of_a_bucket() -> None:
    """Zeros are right somewhere."""
    reference = [call("zeros x -> e"), call("mul q k -> m"), call("expand m -> f"), call("mul f c -> d")]
    candidate = [*reference[:2], call("mul m -> Z"), call("expand Z -> e"), call("mul e c -> D")]
    logs = [[each._replace(view=each.operator == "expand") for each in log] for log in (reference, candidate)]
    culprit = blamed(*logs, "D")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 2)


def test_right_parts_of_a_wrong_tensor_are_no_parts_of_a_bucket() -> None:
    """A query put together the other way round gives a gradient of which each half is a right one, in another place."""
    reference = [call("cat n r -> q"), call("attend_backward q g -> d"), call("transpose d -> t")]
    reference += [call("slice t -> a"), call("slice t -> b"), call("mul a w -> s")]
    candidate = [call("cat r n -> Q"), call("attend_backward Q g -> D"), call("transpose D -> T")]
    candidate += [call("slice T -> b"), call("slice T -> a"), call("mul b w -> S")]
    views = ("transpose", "slice")
    logs = [[each._replace(view=each.operator in views) for each in log] for log in (reference, candidate)]
    culprit = blamed(*logs, "S")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("exchanges", 0)


def test_of_two_defects_the_earlier_one_is_blamed() -> None:
    candidate = [call("mm x w -> A"), call("silu A -> B"), STEP[2], call("mul b g -> D", BACKWARD)]
    culprit = blamed(STEP, candidate, "B", "D")
    assert culprit is not None and culprit.candidate == 0


def test_a_difference_that_reaches_no_result_is_not_blamed() -> None:
    candidate = [call("silu x -> Q"), STEP[0], call("silu a -> B"), call("sum B -> L")]
    culprit = blamed(STEP, candidate, "L")
    assert culprit is not None and culprit.candidate == 2


def test_chunk_0_does_not_stand_for_chunk_1() -> None:
    first, second = FORWARD._replace(chunk=0), FORWARD._replace(chunk=1)
    reference = [call("mm x w -> a", first), call("mm y w -> b", second), call("cat a b -> c")]
    candidate = [call("mm x w -> a", first), call("mm x w -> a", second), call("cat a a -> C")]
    culprit = blamed(reference, candidate, "C")
    assert culprit is not None
    assert (culprit.how, culprit.candidate, culprit.reference) == ("reads", 1, 1)


def test_what_runs_once_stands_for_both_chunks() -> None:
    reference = [call("gather s -> w", FORWARD._replace(chunk=i)) for i in (0, 1)] + [call("mm x w -> a")]
    candidate = [call("gather s -> w"), call("mm x w -> A")]
    culprit = blamed(reference, candidate, "A")
    assert culprit is not None and culprit.candidate == 1


def reduce_scatter(text: str) -> Call:
    return call(f"reduce_scatter {text}", BACKWARD, collective=True)


APART = [call("mul x -> a"), call("mul y -> b"), reduce_scatter("a -> r"), reduce_scatter("b -> s")]


def test_a_bucket_that_is_summed_otherwise_is_blamed_on_the_collective_and_not_on_what_packs_it() -> None:
    packed = [*APART[:2], call("reshape a -> A1"), call("reshape b -> B1"), call("cat A1 B1 -> P", BACKWARD)]
    candidate = [*packed, reduce_scatter("P -> Q"), call("split Q -> R S", BACKWARD)]
    culprit = blamed(APART, candidate, "R", "S")
    assert culprit is not None
    assert (culprit.call.operator, culprit.how, culprit.candidate) == ("reduce_scatter", "adds", 5)


def test_a_bucket_of_a_wrong_value_is_blamed_on_what_computed_that() -> None:
    packed = [APART[0], call("mul y -> B"), call("cat a B -> P", BACKWARD)]
    candidate = [*packed, reduce_scatter("P -> Q"), call("split Q -> r S", BACKWARD)]
    culprit = blamed(APART, candidate, "S")
    assert culprit is not None and culprit.candidate == 1


def test_a_wrong_value_that_another_rank_packed_is_blamed_on_that_rank() -> None:
    right = [*APART[:2], call("cat a b -> P", BACKWARD), reduce_scatter("P -> Q"), call("split Q -> r S", BACKWARD)]
    wrong = [APART[0], call("mul y -> B"), call("cat a B -> P2", BACKWARD), reduce_scatter("P2 -> Q2")]
    culprit = find_culprit([APART, APART], [right, wrong], {0: [("s", "S")]})
    assert culprit is not None and (culprit.rank, culprit.candidate) == (1, 1)


def test_a_bucket_that_was_packed_in_another_order_is_not_blamed_on_the_collective() -> None:
    """One that was put into the other's place shows as a right value of another tensor."""
    packed = [*APART[:2], call("cat b a -> P", BACKWARD), reduce_scatter("P -> Q")]
    candidate = [*packed, call("split Q -> S2 R2", BACKWARD), call("scale S2 -> s"), call("scale R2 -> T", BACKWARD)]
    culprit = find_culprit([APART], [candidate], {0: [("r", "s"), ("t", "T")]})
    assert culprit is not None and culprit.call.operator == "cat"


def test_calls_that_a_pass_added_are_passed_over_when_they_are_right() -> None:
    reference = [call("neg x -> a"), call("reduce a -> r"), call("neg y -> b"), call("reduce b -> s")]
    candidate = [
        call("neg x -> A"),
        call("neg y -> b"),
        call("join A b -> J"),
        call("reduce J -> K"),
        call("cut K -> R s"),
    ]
    culprit = blamed(reference, candidate, "R")
    assert culprit is not None and culprit.candidate == 0


def test_a_call_that_a_pass_added_is_blamed_when_what_it_read_is_right() -> None:
    reference = [call("neg x -> a"), call("sum a -> r")]
    candidate = [call("neg x -> a"), call("copy a -> C"), call("sum C -> R")]
    culprit = blamed(reference, candidate, "R")
    assert culprit is not None
    assert (culprit.how, culprit.candidate, culprit.reference) == ("adds", 1, None)


def test_a_call_that_stands_for_another_is_reported_at_that_ones_place_and_one_that_was_put_between_is_not() -> None:
    there, near = CallSite("layers.0.mlp", "forward", 1), CallSite("layers.0.mlp.w1", "forward", 1)
    reference = [call("mm x w -> a", near), call("silu a -> b", there), call("sum b -> l")]
    replaced = [reference[0], call("relu a -> B", near), call("sum B -> L")]
    culprit = blamed(reference, replaced, "L")
    assert culprit is not None and (culprit.call.place, culprit.instead_of, culprit.candidate) == (there, "silu", 1)
    assert call_of(culprit).how == "is an extra call that the reference does not have, in place of silu"
    between = [reference[0], call("relu a -> A", near), call("silu A -> B", there), call("sum B -> L")]
    culprit = blamed(reference, between, "L")
    assert culprit is not None and (culprit.call.place, culprit.instead_of) == (near, "")


def test_a_new_view_is_passed_over_in_favor_of_the_new_call_that_reads_it() -> None:
    view = call("bits a -> i")._replace(view=True)
    candidate = [STEP[0], view, call("flip_ i -> j")._replace(aliases=("A",)), call("silu A -> B")]
    culprit = blamed(STEP, candidate, "B")
    assert culprit is not None and culprit.call.operator == "flip_"
    culprit = blamed(STEP, [STEP[0], view._replace(outputs=("A",)), call("silu A -> B")], "B")
    assert culprit is not None and culprit.call.operator == "bits"


def test_an_input_that_no_call_computed_puts_the_blame_on_its_first_reader() -> None:
    culprit = blamed(STEP, [call("mm X w -> A"), call("silu A -> B"), call("sum B -> L")], "L")
    assert culprit is not None
    assert (culprit.how, culprit.candidate) == ("inherits", 0), "nobody looked at what left it"


def test_a_tensor_that_was_changed_outside_of_every_call_has_no_culprit() -> None:
    assert blamed(STEP, STEP, "Z") is None


def exchange(sent: str, received: str) -> Call:
    return call(f"all_to_all {sent} -> {received}", collective=True)


def test_a_bad_all_to_all_is_blamed_on_the_rank_that_received_wrong_rows() -> None:
    reference = [[call("mm x w -> a"), exchange("a", "b"), call("sum b -> l")]] * 4
    candidate = [list(log) for log in reference]
    candidate[3] = [call("mm x w -> a"), exchange("a", "B"), call("sum B -> L")]
    culprit = find_culprit(reference, candidate, {3: [("l", "L")]})
    assert culprit is not None
    assert (culprit.rank, culprit.candidate, culprit.ranks) == (3, 1, (3,))


def test_a_rank_that_received_wrong_rows_is_not_blamed_for_them() -> None:
    reference = [[call(f"mm x{r} w -> a{r}"), exchange(f"a{r}", f"b{r}"), call(f"sum b{r} -> l{r}")] for r in range(4)]
    candidate = [list(log) for log in reference]
    candidate[2][0] = call("mm x2 w -> A")
    candidate[2][1] = exchange("A", "b2")
    candidate[0][1:] = [exchange("a0", "B"), call("sum B -> L")]
    culprit = find_culprit(reference, candidate, {0: [("l0", "L")]})
    assert culprit is not None
    assert (culprit.rank, culprit.candidate, culprit.call.operator, culprit.ranks) == (2, 0, "mm", (2,))


def test_ranks_are_matched_by_their_collectives_where_one_makes_calls_of_its_own() -> None:
    reference = [[call(f"mm x{r} w -> a{r}"), exchange(f"a{r}", f"b{r}"), call(f"sum b{r} -> l{r}")] for r in range(3)]
    extra = call("neg v -> n")
    reference[1] = [extra, extra, *reference[1]]
    candidate = [list(log) for log in reference]
    candidate[1][2:4] = [call("mm x1 w -> A"), exchange("A", "b1")]
    candidate[0][1:] = [exchange("a0", "B"), call("sum B -> L")]
    culprit = find_culprit(reference, candidate, {0: [("l0", "L")]})
    assert culprit is not None
    assert (culprit.how, culprit.rank, culprit.candidate, culprit.ranks) == ("computes", 1, 2, (1,))


def test_every_rank_that_saw_the_same_defect_is_listed() -> None:
    reference = [[call("mm x w -> a"), call("sum a -> l")]] * 3
    candidate = [[call("mm x w -> A"), call("sum A -> L")], reference[1], [call("mm x w -> A"), call("sum A -> L")]]
    culprit = find_culprit(reference, candidate, {0: [("l", "L")], 2: [("l", "L")]})
    assert culprit is not None
    assert (culprit.rank, culprit.ranks) == (0, (0, 2))


def test_a_call_that_the_candidate_leaves_out_is_named_and_not_its_reader() -> None:
    candidate = [STEP[0], call("sum a -> L")]
    culprit = blamed(STEP, candidate, "L")
    assert culprit == Culprit(how="lacks", call=STEP[1], ranks=(0,), candidate=None, reference=1)


def test_a_last_call_that_is_left_out_is_named_although_nothing_that_ran_is_wrong() -> None:
    reference = [call("neg x -> a"), call("neg y -> b"), call("add a b -> g")]
    culprit = find_culprit([reference], [reference[:2]], {0: [("g", "a")]})
    assert culprit is not None
    assert (culprit.how, culprit.call, culprit.reference) == ("lacks", reference[2], 2)


def test_a_sums_inputs_in_another_order_are_the_same_inputs_and_a_differences_are_not() -> None:
    culprit = blamed([call("add a b -> c")], [call("add b a -> C")], "C")
    assert culprit is not None and culprit.how == "computes"
    culprit = blamed([call("sub a b -> c")], [call("sub b a -> C")], "C")
    assert culprit is not None and (culprit.how, culprit.reference) == ("exchanges", 0)
    assert call_of(culprit).how == "reads the same inputs in another order"


def test_a_call_that_only_hands_a_value_on_did_not_make_it() -> None:
    reference = [call("neg x -> a"), call("neg y -> b"), call("add a b -> g"), call("update_ p g -> q g")]
    candidate = [*reference[:2], call("update_ p a -> Q a")]
    culprit = find_culprit([reference], [candidate], {0: [("g", "a"), ("q", "Q")]})
    assert culprit is not None
    assert (culprit.how, culprit.call) == ("lacks", reference[2])


UNKNOWN_DIRECTION = CallSite(None, None)


def without_directions(calls: list[Call]) -> list[Call]:
    """The same calls, made by a graph that does not say where they belong."""
    return [call._replace(place=UNKNOWN_DIRECTION) for call in calls]


def test_calls_whose_direction_is_not_known_are_paired_by_their_values() -> None:
    reference = [call("mm x w -> a"), call("mm g y -> d", BACKWARD), call("neg d -> e", BACKWARD)]
    assert blamed(reference, without_directions(reference), "e") is None
    candidate = without_directions([reference[0], call("mm g y -> D"), call("neg D -> E")])
    culprit = blamed(reference, candidate, "E")
    assert culprit is not None
    assert (culprit.how, culprit.candidate, culprit.reference) == ("computes", 1, 1)


def test_calls_of_two_known_directions_do_not_stand_for_each_other() -> None:
    reference = [call("neg x -> a"), call("neg g -> d", BACKWARD)]
    culprit = blamed(reference, [call("neg x -> d"), call("sum d -> L")], "L")
    assert culprit is not None and culprit.candidate == 0


def view(text: str, place: CallSite = FORWARD) -> Call:
    return call(text, place)._replace(view=True)


def test_a_view_that_the_reference_takes_by_another_operator_is_right() -> None:
    reference = [view("transpose x -> y"), view("t w -> v"), call("mm v a -> b")]
    candidate = [view("transpose x -> y"), view("transpose w -> v"), call("mm v a -> B")]
    culprit = blamed(reference, candidate, "B")
    assert culprit is not None and culprit.candidate == 2


def test_half_of_what_the_reference_splits_is_right_though_it_slices_elsewhere() -> None:
    split, narrow = call("split x -> a b")._replace(view=True), call("slice w -> v")._replace(view=True)
    reference = [narrow, split, call("mul a g -> c"), call("mul b g -> d")]
    halves = [call("slice x -> a")._replace(view=True), call("slice x -> b")._replace(view=True)]
    culprit = blamed(reference, [narrow, *halves, reference[2], call("mul b h -> D")], "D")
    assert culprit is not None and (culprit.call.operator, culprit.candidate) == ("mul", 4)
    wrong = [halves[0], call("slice x -> B")._replace(view=True)]
    culprit = blamed(reference, [narrow, *wrong, reference[2], call("mul B g -> D")], "D")
    assert culprit is not None and (culprit.call.operator, culprit.candidate) == ("slice", 2)


def test_a_view_that_keeps_the_order_of_elements_is_passed_over() -> None:
    reference = [view("view z -> y"), call("mm a w -> b")]
    culprit = blamed(reference, [view("view a -> Q"), call("mm Q w -> B")], "B")
    assert culprit is not None and culprit.call.operator == "mm"


def test_a_call_is_traced_back_to_what_left_its_input_and_not_to_another_of_the_same_value() -> None:
    reference = [call("neg x -> a"), call("zeros -> o"), call("add o p -> s")]
    candidate = [call("neg x -> O"), call("zeros -> O"), call("zeros -> O"), call("add O p -> S")]
    exact = [*candidate[:3], candidate[3]._replace(producers=(1, None))]
    culprit = blamed(reference, exact, "S")
    assert culprit is not None and culprit.candidate == 1


def test_a_call_that_leads_only_to_tensors_that_agree_is_not_blamed() -> None:
    reference = [call("mul a -> o"), call("neg x -> z"), call("add z -> s"), call("sum o -> t")]
    # Both `mul` and the wrong `neg` come to O, and only the latter is read by what differs.
    candidate = [
        call("neg x -> O"),
        call("mul a -> O"),
        call("add O -> S")._replace(producers=(0,)),
        call("sum O -> t"),
    ]
    culprit = blamed(reference, candidate, "S")
    assert culprit is not None and culprit.call.operator == "neg"


def recording(**digests: str) -> Recording:
    """Gradients of step 0 on rank 0, by name."""
    manifest = Manifest(case={}, system="toy", world_size=1, steps=1)
    keys = {Key(0, "grad", name, 0): Record(digest, "float32", (2,)) for name, digest in digests.items()}
    return Recording(manifest, keys)


def test_a_gradient_that_was_exchanged_with_another_is_reported_by_the_others_name() -> None:
    reference, candidate = recording(a="1", b="2", c="3"), recording(a="2", b="1", c="4")
    assert held_as(reference, candidate, Key(0, "grad", "a", 0)) == "grad b"
    assert held_as(reference, candidate, Key(0, "grad", "c", 0)) is None
    assert held_as(recording(a="1", b="2", c="2"), candidate, Key(0, "grad", "a", 0)) is None, "two hold the same"


def test_numbers_and_words_that_the_partner_was_given_otherwise_are_reported() -> None:
    reference = [call("add a -> b")._replace(scalars=(("alpha", "1"), ("dim", "0")))]
    candidate = [call("add a -> B")._replace(scalars=(("alpha", "2"), ("dim", "0")))]
    culprit = blamed(reference, candidate, "B")
    assert culprit is not None and culprit.arguments == "alpha=2 where the reference has 1"
    assert call_of(culprit).how == "has the same inputs and a different output, with alpha=2 where the reference has 1"
    same = blamed(reference, [reference[0]._replace(outputs=("B",))], "B")
    assert same is not None and call_of(same).how == "has the same inputs and a different output"


def test_a_collective_that_nobody_waits_for_is_reported_as_such() -> None:
    reference = [call("all_gather a -> b", collective=True), call("mm b -> c")]
    launched = call("all_gather a -> b", collective=True)._replace(outputs=())
    culprit = blamed(reference, [launched, call("mm x -> C")._replace(producers=(0,))], "C")
    assert culprit is not None and call_of(culprit).how == "is launched, and never waited for"


def test_what_reads_a_collective_too_early_is_blamed_on_the_collective_and_not_on_its_absence() -> None:
    made, launch = call("mul x -> a"), call("all_gather a -> b", collective=True)
    reference, launched, early = [made, launch, call("mm b -> c")], launch._replace(outputs=()), call("mm U -> C")
    culprit = blamed(reference, [made, launched, early], "C")
    assert culprit == Culprit(how="abandons", call=launched, ranks=(0,), candidate=1, reference=1)
    culprit = blamed(reference, [made, early], "C")
    assert culprit is not None and (culprit.how, culprit.reference) == ("lacks", 1)


def test_a_bucket_of_gathers_is_not_blamed_for_what_a_later_call_computes() -> None:
    gather = [call("all_gather u -> v", collective=True), call("all_gather w -> x", collective=True)]
    reference = [*gather, call("mm v y -> a"), call("mul a x -> b")]
    packed = [call("cat u w -> p"), call("all_gather p -> q", collective=True), call("split q -> r s")]
    packed += [call("view r -> v"), call("view s -> x")]
    culprit = blamed(reference, [*packed, call("mm v y -> A"), call("mul A s -> B")], "B")
    assert culprit is not None and (culprit.call.operator, culprit.how) == ("mm", "computes")


PACKED = [call("cat u w -> p"), call("all_gather p -> q", collective=True)]
GATHERED = [call("all_gather u -> v", collective=True), call("all_gather w -> x", collective=True)]


def parts(text: str) -> list[Call]:
    """A bucket taken apart, by parts that the reference has nowhere, and views of them that it has."""
    return [call(f"split_with_sizes_copy {text} -> r s"), view("view r -> v"), view("view s -> x")]


def test_what_changes_a_right_bucket_is_blamed_and_not_the_bucket() -> None:
    reference = [*GATHERED, call("mm v y -> a"), call("mul a x -> b")]
    wrong = [call("split_with_sizes_copy T -> R S"), view("view R -> V"), view("view S -> X")]
    candidate = [*PACKED, call("roll q -> T"), *wrong, call("mm V y -> A"), call("mul A X -> B")]
    culprit = blamed(reference, candidate, "B")
    assert culprit is not None and (culprit.call.operator, culprit.how) == ("roll", "adds")


def test_what_reads_another_part_of_a_right_bucket_is_blamed() -> None:
    reference = [*GATHERED, call("mm v y -> a"), call("mul a x -> b")]
    candidate = [*PACKED, *parts("q"), call("mm x y -> A"), call("mul A v -> B")]
    culprit = blamed(reference, candidate, "B")
    assert culprit is not None and (culprit.call.operator, culprit.how) == ("mm", "reads")


def test_a_bucket_that_lost_a_gradient_is_blamed_and_not_what_reads_another_ones_in_its_place() -> None:
    made = [call("mul k -> a"), call("mul l -> b")]
    reference = [*made, reduce_scatter("a -> r"), reduce_scatter("b -> s"), call("add r s -> t", BACKWARD)]
    packed = [*made, call("cat a a -> P", BACKWARD), reduce_scatter("P -> Q")]
    candidate = [
        *packed,
        call("split Q -> R R", BACKWARD),
        view("view R -> r", BACKWARD),
        call("add r r -> T", BACKWARD),
    ]
    culprit = blamed(reference, candidate, "T")
    assert culprit is not None and culprit.call.operator == "reduce_scatter"


def test_a_bucket_that_lost_a_gradient_is_blamed_though_its_parts_are_right_values_of_others() -> None:
    """Zeros, or the same part twice: the sum of chunks reads right values, and misses what the bucket should give."""
    made = [call("mul k -> a", BACKWARD), call("mul l -> b", BACKWARD)]
    scattered = [reduce_scatter("a -> r"), reduce_scatter("b -> s")]
    reference = [view("view k -> m", BACKWARD), call("zeros -> z", BACKWARD), *made, *scattered]
    reference.append(call("add r s -> t", BACKWARD))
    for packed, culprit_is in (("Z1", "zeros_like"), ("A1", "reduce_scatter")):
        candidate = [*made, view("view a -> A1", BACKWARD), view("view b -> B1", BACKWARD)]
        candidate += [call("zeros_like B1 -> Z1", BACKWARD), call(f"cat A1 {packed} -> P", BACKWARD)]
        candidate += [reduce_scatter("P -> Q"), view("split Q -> R1 S1", BACKWARD), view("view R1 -> r", BACKWARD)]
        candidate += [view("view S1 -> z", BACKWARD), call("add r z -> T", BACKWARD)]
        given = [(None,), (None,), (0,), (1,), (3,), (2, 4 if packed == "Z1" else 2), (5,), (6,), (7,), (7,), (8, 9)]
        culprit = blamed(reference, logged(given, candidate), "T")
        assert culprit is not None and culprit.call.operator == culprit_is


def test_a_value_made_of_nothing_is_blamed_only_where_nothing_else_is() -> None:
    """How long `arange` is depends on what earlier calls computed."""
    reference = [call("arange -> n"), call("mm x w -> a"), call("index a n -> l")]
    candidate = [call("arange -> N"), call("mm x w -> A"), call("index A N -> L")]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None and culprit.call.operator == "mm"
    culprit = blamed(reference, [candidate[0], reference[1], call("index a N -> L")], "L")
    assert culprit is not None and culprit.call.operator == "arange"


def test_a_join_before_a_value_that_is_made_of_nothing_is_blamed_for_its_length() -> None:
    made = [call("mul k -> a"), call("mul l -> b")]
    reference = [*made, call("cat a b -> c"), call("mul c -> d"), call("arange -> n"), call("index d n -> l")]
    for joined in ("cat b a -> C", "cat a a -> C"):
        candidate = [*made, call(joined), call("mul C -> D"), call("arange -> N"), call("index D N -> L")]
        culprit = blamed(reference, candidate, "L")
        assert culprit is not None and culprit.call.operator == "cat"


def test_of_two_gradients_that_were_exchanged_the_call_that_gave_the_right_one_is_named_and_not_the_update() -> None:
    update = CallSite(None, "update")
    grads = [call("mm x g -> a", BACKWARD), call("mm y g -> b", BACKWARD)]
    reference = [*grads, call("adamw p a -> q a", update), call("adamw r b -> s b", update)]
    candidate = [*grads, call("adamw p b -> Q b", update), call("adamw r a -> S a", update)]
    differing = {0: [("a", "b"), ("b", "a"), ("q", "Q"), ("s", "S")]}
    culprit = find_culprit([reference], [candidate], differing)
    assert culprit == Culprit(how="misplaces", call=grads[0], ranks=(0,), candidate=0, reference=0)
    assert "the tensor has another right value" in str(call_of(culprit).how)
    wrong = [*grads, call("adamw p a -> Q a", update), reference[3]]
    culprit = find_culprit([reference], [wrong], {0: [("q", "Q")]})
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 2)


def test_a_constant_that_a_pass_put_in_a_value_s_place_is_blamed_and_not_what_reads_it() -> None:
    zeros = call("new_zeros -> z")
    reference = [zeros, call("mul x -> a", BACKWARD), reduce_scatter("a -> r")]
    sent = reduce_scatter("z -> R")
    candidate = [zeros, reference[1], call("zeros_like a -> z", BACKWARD), sent._replace(producers=(2,))]
    culprit = blamed(reference, candidate, "R")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 2)
    culprit = blamed(reference, [*candidate[:2], sent._replace(producers=(0,))], "R")
    assert culprit is not None and culprit.call.operator == "reduce_scatter", "no new call made it"


def test_a_call_that_was_left_out_is_named_where_backward_computes_its_value_again() -> None:
    again = call("div x s -> q", BACKWARD)
    reference = [call("sum x -> s"), call("div x s -> q"), call("mul q k -> y"), again]
    candidate = [reference[0], call("mul x k -> Y"), again]
    culprit = blamed(reference, candidate, "Y")
    assert culprit is not None and (culprit.how, culprit.reference) == ("lacks", 1)
    late = [reference[0], call("mul x k -> Y"), reference[1], again]
    culprit = blamed(reference, late, "Y")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("reads", 1), "it is made, and not read"


def test_a_rank_on_which_a_new_call_changes_nothing_is_not_among_those_to_blame() -> None:
    reference = [call("mul x w -> a", BACKWARD), reduce_scatter("a -> r")]
    harmless = [reference[0], call("mul a -> a", BACKWARD), reduce_scatter("a -> R")]
    wrong = [reference[0], call("mul a -> A", BACKWARD), reduce_scatter("A -> R")]
    differing = {rank: [("r", "R")] for rank in (0, 1)}
    culprit = find_culprit([reference, reference], [harmless, wrong], differing)
    assert culprit is not None and (culprit.ranks, culprit.candidate) == ((1,), 1)
    replaced = [call("mul x -> x", BACKWARD), reduce_scatter("x -> R")]
    culprit = find_culprit([reference], [replaced], {0: [("r", "R")]})
    assert culprit is not None and culprit.candidate == 0, "it stands for another call"


def test_a_gather_that_nobody_waits_for_is_named_where_another_s_value_is_read_in_its_place() -> None:
    def gather(text: str) -> Call:
        return call(f"gather {text}", collective=True)

    reference = [gather("s -> w"), gather("t -> v"), call("mm x w -> a"), call("mm y v -> b")]
    candidate = [gather("s -> w"), gather("t ->  "), call("mm x w -> a"), call("mm y w -> B")]
    culprit = blamed(reference, candidate, "B")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("abandons", 1)


def test_a_gather_that_nobody_waits_for_went_missing_in_no_bucket_though_a_part_of_one_is_read_in_its_place() -> None:
    reference = [view("view k -> m"), *GATHERED, call("all_gather t -> z", collective=True), call("mm y z -> b")]
    bucket = [*PACKED, *parts("q"), call("all_gather t -> ", collective=True), call("mm y x -> B")]
    given: list[tuple[int | None, ...]] = [(None, None), (0,), (1,), (2,), (2,), (None,), (None, 4)]
    culprit = blamed(reference, logged(given, bucket), "B")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("abandons", 5)


def test_what_gives_another_output_of_the_same_inputs_is_blamed_before_another_way_to_a_right_value() -> None:
    reference = [call("mul x w -> m"), call("gelu m -> g"), call("silu y -> s"), call("add g s -> l")]
    products = [reference[0], call("mul m h -> Q"), call("mul Q m -> g")]
    candidate = [*products, call("silu y -> S"), call("add g S -> L")]
    culprit = blamed(reference, logged([(None, None), (0, None), (1, 0), (None,), (2, 3)], candidate), "L")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 3)


def test_what_the_reference_packs_too_is_blamed_before_what_is_packed_anew_and_right() -> None:
    made = [call("mul x -> r"), call("mul y -> s")]
    reference = [view("slice z -> n"), *made, call("cat a b -> c"), call("where c r s -> l")]
    stacked = [*made, call("stack r s -> P"), view("slice P -> r"), view("slice P -> s")]
    candidate = [*stacked, call("cat b a -> C"), call("where C r s -> L")]
    given: list[tuple[int | None, ...]] = [(None,), (None,), (0, 1), (2,), (2,), (None, None), (5, 3, 4)]
    culprit = blamed(reference, logged(given, candidate), "L")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("exchanges", 5)


def test_a_product_with_one_on_a_lower_rank_changes_nothing_and_is_not_blamed() -> None:
    reference = [call("mul x w -> a", BACKWARD), call("neg a -> b", BACKWARD), reduce_scatter("b -> r")]
    by_one = [*reference[:2], call("mul b -> b", BACKWARD), reduce_scatter("b -> R")]
    wrong = [*reference[:2], call("mul b -> B", BACKWARD), reduce_scatter("B -> R")]
    culprit = find_culprit([reference] * 2, [by_one, wrong], {rank: [("r", "R")] for rank in (0, 1)})
    assert culprit is not None and (culprit.how, culprit.rank, culprit.ranks) == ("adds", 1, (1,))


def test_a_call_too_many_of_its_operator_is_new_and_not_another_one_that_reads_something_else() -> None:
    reference = [call("index t p -> a"), call("add a b -> c"), call("sum c -> l")]
    candidate = [call("add p o -> P"), call("index t P -> A"), call("add A b -> C"), call("sum C -> L")]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("adds", 0, None)


def test_a_call_that_is_made_of_another_right_value_is_not_missing_and_one_that_is_not_made_is() -> None:
    weight = call("neg v -> n")
    reference = [weight, call("mm x w -> a"), call("mm x v -> b"), call("mul a b -> c")]
    candidate = [weight, reference[1], call("mm x w -> a"), call("mul a a -> C")]
    culprit = blamed(reference, candidate, "C")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("reads", 2, 2)
    left_out = blamed(reference, [weight, reference[1], call("mul a a -> C")], "C")
    assert left_out is not None and (left_out.how, left_out.candidate, left_out.reference) == ("lacks", None, 2)


def test_what_is_computed_again_from_another_value_reads_that_and_is_no_call_of_its_own() -> None:
    reference = [call("mm x w -> a"), call("silu a -> b"), call("neg g -> h"), call("mul b h -> d", BACKWARD)]
    again = call("silu h -> B")._replace(node="silu_1_recomputed_chunk1", producers=(2,))
    candidate = [*reference[:3], again, call("mul B h -> D", BACKWARD)._replace(producers=(3, 2))]
    candidate[1] = candidate[1]._replace(node="silu_1_chunk1")
    culprit = blamed(reference, candidate, "D")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("reads", 3, 1)
    candidate[3] = again._replace(node="silu_2")
    culprit = blamed(reference, candidate, "D")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("adds", 3, None)


def test_an_exchange_in_a_bucket_is_found_behind_what_follows_though_that_agrees_call_by_call() -> None:
    """Clipping scales each part by a norm of all, which does not know their order."""
    update = CallSite(None, "update")
    made = [call("mul x -> a", BACKWARD), call("mul y -> b", BACKWARD)]

    def log(packed: str, bucket: str, summed: str, parts: str, clipped: list[str]) -> list[Call]:
        return [
            *made,
            call(f"chunk_cat {packed} -> {bucket}", BACKWARD)._replace(producers=(0, 1)),
            reduce_scatter(f"{bucket} -> {summed}")._replace(producers=(2,)),
            call(f"split {summed} -> {parts}", BACKWARD)._replace(producers=(3,), view=True),
            *(call(text, update)._replace(producers=(4, None)) for text in clipped),
        ]

    scaled = ["foreach_mul r n -> s", "foreach_mul t n -> u"]
    reference = [log("a b", "p", "q", "r t", scaled)]
    candidate = [log("b a", "P", "Q", "t r", scaled[::-1])]
    culprit = find_culprit(reference, candidate, {0: [("s", "u"), ("u", "s")]})
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("exchanges", "chunk_cat")
    unscaled = [
        [call(f"mul {x} k -> {x}k", update)._replace(producers=(at, None)) for x, at in order]
        for order in ((("s", 5), ("u", 6)), (("u", 5), ("s", 6)))
    ]
    reference, candidate = [[*reference[0], *unscaled[0]]], [[*candidate[0], *unscaled[1]]]
    culprit = find_culprit(reference, candidate, {0: [("sk", "uk"), ("uk", "sk")]})
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("exchanges", "chunk_cat")


def test_a_call_that_leads_to_another_record_is_not_blamed_for_the_first() -> None:
    reference = [call("mm x w -> a"), call("sum a -> l"), call("neg y -> b"), call("mul b g -> d", BACKWARD)]
    candidate = [call("mm x w -> A"), call("sum A -> L"), call("neg y -> B"), call("mul B g -> D", BACKWARD)]
    for first, blamed_at in ((("d", "D"), 2), (("l", "L"), 0)):
        culprit = find_culprit([reference], [candidate], {0: [("l", "L"), ("d", "D")]}, (0, first))
        assert culprit is not None and culprit.candidate == blamed_at
        assert culprit.explains == (0, *first)


def test_a_call_of_another_rank_that_no_value_leads_from_is_not_blamed_though_it_came_earlier_in_its_log() -> None:
    reference = [[call("neg z -> y"), call("mm x w -> a"), call("sum a -> l")], [call("mul g h -> d", BACKWARD)]]
    candidate = [[*reference[0][:1], call("mm x w -> A"), call("sum A -> L")], [call("mul g h -> D", BACKWARD)]]
    differing = {0: [("l", "L")], 1: [("d", "D")]}
    culprit = find_culprit(reference, candidate, differing, (0, ("l", "L")))
    assert culprit is not None and (culprit.rank, culprit.candidate) == (0, 1)


def test_a_record_that_no_call_explains_leaves_the_next_one_that_a_call_does() -> None:
    candidate = [STEP[0], call("silu a -> B"), call("sum B -> L"), STEP[3]]
    culprit = find_culprit([STEP], [candidate], {0: [("d", "Z"), ("l", "L")]}, (0, ("d", "Z")))
    assert culprit is not None and (culprit.candidate, culprit.explains) == (1, (0, "l", "L"))


def test_of_a_collective_the_rank_is_blamed_that_gave_it_another_right_value() -> None:
    def log(rank: int, given: str, summed: str) -> list[Call]:
        made = [call(f"mul x{rank} -> a{rank}"), call(f"mul y{rank} -> b{rank}")]
        reduced = call(f"all_reduce {given}{rank} -> {summed}", collective=True)._replace(peers=(0, 1))
        return [*made, reduced, call(f"sum {summed} -> l{summed}")]

    reference = [log(rank, "a", "s") for rank in (0, 1)]
    candidate = [log(0, "a", "S"), log(1, "b", "S")]
    culprit = find_culprit(reference, candidate, {0: [("ls", "lS")], 1: [("ls", "lS")]})
    assert culprit is not None and (culprit.how, culprit.rank, culprit.ranks) == ("reads", 1, (1,))


def test_what_came_in_another_ones_turn_is_blamed_on_the_rank_that_sent_it_so() -> None:
    """All that the receiver computes is right by itself, and wired as in the reference."""

    def logs(first: str, second: str, sums: str) -> list[list[Call]]:
        sent = [call(f"send {x} -> {x}", collective=True)._replace(peers=(1, 0), outputs=()) for x in (first, second)]
        got = [call(f"recv_ -> {x}", collective=True)._replace(peers=(1, 0)) for x in (first, second)]
        scaled = [call(f"mul w {x} -> {x}w") for x in (first, second)]
        summed = [call(f"mul {x}w k{i} -> {s}") for i, (x, s) in enumerate(zip((first, second), sums, strict=True))]
        mine = [got[0], scaled[0], summed[0], got[1], scaled[1], summed[1]]
        return [mine, [call("neg x -> a"), call("neg y -> b"), *sent]]

    reference, candidate = logs("a", "b", "pq"), logs("b", "a", "PQ")
    culprit = find_culprit(reference, candidate, {0: [("p", "P"), ("q", "Q")]})
    assert culprit is not None and (culprit.call.operator, culprit.how, culprit.rank) == ("send", "reads", 1)
    assert culprit.candidate == 2
    reads_other = [[*reference[0][:2], call("mul bw k0 -> P"), *reference[0][3:]], reference[1]]
    culprit = find_culprit(reference, reads_other, {0: [("p", "P")]})
    assert culprit is not None and (culprit.rank, culprit.candidate) == (0, 2), "which is wired otherwise"


def test_a_call_that_gives_less_of_the_same_inputs_is_reported_by_its_numbers_and_not_to_read_others() -> None:
    masked = call("norm_backward g x -> q", BACKWARD)._replace(scalars=(("output_mask", "[False, True]"),))
    whole = masked._replace(outputs=("p", "q"), scalars=(("output_mask", "[True, True]"),))
    reference = [whole, call("add p r -> d", BACKWARD), call("cat d q -> l", BACKWARD)]
    culprit = blamed(reference, [masked, call("add q r -> D", BACKWARD), call("cat D q -> L", BACKWARD)], "L")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 0)
    assert culprit.arguments == "output_mask=[False, True] where the reference has [True, True]"


def test_what_takes_no_tensor_is_not_said_to_read_others() -> None:
    reference = [call("rand -> r"), call("mul r x -> l")]
    culprit = blamed(reference, [call("rand -> R"), call("mul R x -> L")], "L")
    assert culprit is not None and call_of(culprit).how == "has no tensor input, and a different output"


def test_an_update_that_leaves_out_a_parameter_lacks_that_call_though_nothing_else_reads_the_parameter() -> None:
    update = CallSite(None, "update")
    reference = [call("mm x g -> a", BACKWARD), call("adamw p a -> q", update), call("adamw r a -> s", update)]
    culprit = find_culprit([reference], [[reference[0], reference[2]]], {0: [("q", "p")]})
    assert culprit is not None and (culprit.how, culprit.call, culprit.reference) == ("lacks", reference[1], 1)


def test_a_number_that_is_read_out_of_a_wrong_tensor_leads_on_to_what_computed_that() -> None:
    update = CallSite(None, "update")

    def step(count: str, number: str, quotient: str) -> list[Call]:
        return [
            call(f"add_ s -> {count}", update),
            call(f"_local_scalar_dense {count} -> {number}", update)._replace(producers=(0,)),
            call(f"div x -> {quotient}", update)._replace(scalars=(("other", number),)),
        ]

    culprit = blamed(step("t", "n", "q"), step("T", "N", "Q"), "Q")
    assert culprit is not None and (culprit.candidate, culprit.how) == (0, "computes")
    planted = step("t", "n", "Q")
    planted[2] = planted[2]._replace(scalars=(("other", "7"),))
    culprit = blamed(step("t", "n", "q"), planted, "Q")
    assert culprit is not None and culprit.candidate == 2, "the number that was read out is right"


def test_a_draw_stands_for_none_of_another_module() -> None:
    """A recomputation that goes on drawing, where the reference goes back to the state that forward read."""
    places = {way + layer: CallSite(f"layers.{layer}", way) for way in ("forward", "backward") for layer in "01"}

    def draw(text: str, at: str, *producers: int | None) -> Call:
        return call(f"bernoulli {text}", places[at])._replace(draws=True, producers=producers or (None,))

    first = draw("s1 -> m1 s2", "forward1")
    reference = [first, draw("s1 -> m1 s2", "backward1"), draw("s2 -> m2 s3", "forward0", 0)]
    reference += [draw("s3 -> m3 s4", "forward1", 2), draw("s3 -> m3 s4", "backward1", 2), call("mul m2 -> l")]
    candidate = [first, draw("s2 -> m2 s3", "backward1", 0), draw("s3 -> m3 s4", "backward0", 1)]
    candidate += [draw("s4 -> M S", "forward0", 2), call("mul M -> L")._replace(producers=(3,))]
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None and culprit.candidate == 1


def test_a_call_that_is_made_of_what_a_wrong_one_gives_is_not_missing() -> None:
    """A bias that is added before the sum over ranks, and not after it."""
    reference = [call("mm x w -> y"), call("all_reduce y -> z", collective=True), call("add z b -> o")]
    candidate = [reference[0], call("add y b -> Y"), call("all_reduce Y -> O", collective=True)]
    candidate = [candidate[0], candidate[1]._replace(producers=(0, None)), candidate[2]._replace(producers=(1,))]
    culprit = blamed(reference, candidate, "O")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("reads", 1, 2)


def test_what_reads_a_sum_that_nobody_waited_for_leads_to_that_though_both_runs_launch_it() -> None:
    launch = call("all_reduce x -> ", collective=True)
    runs = [[launch, call(f"mul {value} -> {value}2")._replace(producers=(0,))] for value in ("r", "R")]
    culprit = find_culprit([runs[0]], [runs[1]], {0: [("r2", "R2")]})
    assert culprit is not None and (culprit.how, culprit.candidate) == ("abandons", 0)


def test_a_product_with_one_of_a_wrong_value_is_passed_over() -> None:
    candidate = [STEP[0], call("silu a -> B"), call("mul B -> B"), call("sum B -> L")]
    culprit = blamed(STEP, logged([(None, None), (0,), (1,), (2,)], candidate), "L")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 1)
    packed = [call("neg x -> a"), call("cat a b -> P"), call("mul P -> P"), reduce_scatter("P -> Q")]
    reference = [call("neg x -> a"), call("cat a c -> p"), reduce_scatter("p -> q"), call("neg b -> b2")]
    culprit = blamed(reference, logged([(None,), (0, None), (1,), (2,)], packed), "Q")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("reads", 1)


def test_a_value_that_the_reference_comes_to_by_another_call_there_is_right_though_another_one_comes_before() -> None:
    reference = [call("exp x -> a")._replace(scalars=(("number", "1"),)), call("mul y -> b"), call("mm a b -> l")]
    halves = [call("exp x -> H"), call("mul H x -> a"), call("mul y -> b")]
    candidate = logged([(None,), (0, None), (None,), (1, 2)], [*halves, call("mm a b -> L")])
    culprit = blamed(reference, candidate, "L")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 3)


def test_of_two_calls_that_read_right_values_in_another_order_the_first_made_the_other_one_do_so() -> None:
    reference = [call("cat a b -> p"), call("split p -> a b"), call("exp a -> c"), call("exp b -> d")]
    candidate = [call("cat b a -> P"), call("split P -> b a"), call("exp b -> d"), call("exp a -> c")]
    logs = [[each._replace(view=each.operator == "split") for each in log] for log in (reference, candidate)]
    given: list[tuple[int | None, ...]] = [(None, None), (0,), (1,), (1,), (2, 3)]
    culprit = blamed(
        logged(given, [*logs[0], call("stack c d -> q")]), logged(given, [*logs[1], call("stack d c -> Q")]), "Q"
    )
    assert culprit is not None and (culprit.how, culprit.candidate) == ("exchanges", 0)


def test_a_blamed_bucket_that_the_reference_does_not_have_is_reported_with_what_fills_it() -> None:
    packed = [*APART[:2], call("cat a b -> P", BACKWARD), reduce_scatter("P -> Q")]
    candidate = logged([(None,), (None,), (0, 1), (2,), (3,)], [*packed, call("split Q -> R S", BACKWARD)])
    culprit = blamed(APART, candidate, "R", "S")
    assert culprit is not None and culprit.candidate == 3
    known = [*candidate[:3], candidate[3]._replace(outputs=("q",)), candidate[4]._replace(inputs=("q",))]
    culprit = blamed(known, candidate, "R", "S")
    assert culprit is not None and (culprit.candidate, culprit.reading) == (3, ""), "which the reference fills alike"


def test_a_call_that_gives_what_it_reads_is_wrong_where_it_stands_for_one_of_the_reference_s() -> None:
    update = CallSite(None, "update")
    zeroed = [call("add_ c -> d"), call("zero_ d -> z", update), call("zeros -> z", update)]
    kept = [zeroed[0], call("zero_ d -> d", update), zeroed[2]]
    culprit = find_culprit([zeroed], [kept], {0: [("z", "d")]})
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 1), "it does nothing"
    halves = [CallSite("layers.0", "backward", chunk) for chunk in (0, 1)]
    reference = [call("clone a -> a", halves[0]), call("clone b -> b", halves[1])]
    exchanged = [call("clone b -> b", halves[0]), call("clone a -> a", halves[1])]
    sums = [call("mm a x -> l", halves[0]), call("mm b x -> L", halves[0])]
    given: list[tuple[int | None, ...]] = [(None,), (None,), (0, None)]
    culprit = blamed(logged(given, [*reference, sums[0]]), logged(given, [*exchanged, sums[1]]), "L")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("reads", 0), "it copies the other half"


def test_of_gradients_exchanged_in_a_bucket_and_copied_over_what_was_there_the_bucket_s_collective_is_blamed() -> None:
    """What `copy_` writes over is in no bucket."""

    def log(bucket: str, summed: str, first: str, second: str) -> list[Call]:
        views = [call(f"as_strided {summed} -> {part}", BACKWARD)._replace(view=True) for part in (first, second)]
        copies = [call(f"copy_ g {first} -> {first}", BACKWARD), call(f"copy_ h {second} -> {second}", BACKWARD)]
        summing = reduce_scatter(f"{bucket} -> {summed}")._replace(aliases=(first, second))
        calls = [call("mm x -> g", BACKWARD), call("mm y -> h", BACKWARD), summing]
        return logged([(None,), (None,), (0, 1), (2,), (2,), (0, 3), (1, 4)], [*calls, *views, *copies])

    logs = [log("p", "q", "s", "t")], [log("P", "Q", "t", "s")]
    culprit = find_culprit(*logs, {0: [("s", "t"), ("t", "s")]})
    assert culprit is not None and culprit.candidate == 2


def test_a_value_that_reaches_its_reader_by_a_product_with_one_is_made_once_though_two_calls_give_it() -> None:
    reference = [call("mul a g -> b"), call("silu b -> c"), call("sum c -> l")]
    other_way = [call("exp a -> Z"), call("add Z a -> b"), call("mul b -> b"), call("silu b -> C"), call("sum C -> L")]
    culprit = blamed(reference, logged([(None,), (0, None), (1,), (1,), (3,)], other_way), "L")
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("computes", "silu")


def test_what_is_summed_outside_of_modules_as_one_sums_in_place_is_right_and_what_divides_it_again_is_not() -> None:
    reference = [call("mm x w -> a", BACKWARD), call("add_ a b -> c c", BACKWARD)]
    engine = CallSite(None, "backward")
    divided = [reference[0], call("add a b -> c", engine), call("div c -> C", engine)]
    culprit = blamed(reference, logged([(None, None), (0, None), (1,)], divided), "C")
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 2)


def test_what_a_new_call_sends_in_place_of_a_right_value_is_blamed_and_not_the_receiver() -> None:
    """What arrives as zeros stays right on the way, as a product of zeros is a value that others have."""

    def ranks(sent: str, got: str, *before: Call, place: CallSite = BACKWARD) -> list[list[Call]]:
        peers = {"collective": True, "peers": (1, 0), "place": place}
        send = call(f"send {sent} -> {sent}")._replace(outputs=(), producers=(len(before),), **peers)
        received = [call(f"recv_ e -> {got}")._replace(producers=(None,), **peers)]
        received += [call(f"mm {got} w -> {'g' if got == 'd' else 'n'}")._replace(producers=(0, None))]
        return [[*received, call("zeros -> n"), call("zeros -> z")], [call("silu x -> d"), *before, send]]

    reference, zeroed = ranks("d", "d"), ranks("z", "z", call("mul d -> z")._replace(producers=(0,)), place=FORWARD)
    reference[1].append(call("zeros -> z"))
    culprit = find_culprit(reference, zeroed, {0: [("g", "n")]})
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.rank) == ("adds", "mul", 1)


def test_a_constant_that_stands_in_a_bucket_where_a_value_should_is_blamed_and_not_the_sum_that_is_missing() -> None:
    reference = [call("mm x w -> a"), call("reduce a -> r", collective=True), call("zeros -> z")]
    bucket = [call("mm x w -> a"), call("zeros_like a -> z"), call("reduce z -> z", collective=True)]
    culprit = find_culprit([reference], [logged([(None, None), (0,), (1,)], bucket)], {0: [("r", "z")]})
    assert culprit is not None and (culprit.how, culprit.candidate) == ("adds", 1)


def test_of_what_was_left_wrong_the_first_call_that_computes_of_it_is_blamed_and_no_view() -> None:
    reference = [call("t w -> v")._replace(view=True), call("mm x v -> a"), call("sum a -> l")]
    candidate = [call("t W -> V")._replace(view=True), call("mm x V -> A"), call("sum A -> L")]
    given = [(None,), (None, 0), (1,)]
    culprit = blamed(logged(given, reference), logged(given, candidate), "L")
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.candidate) == ("inherits", "mm", 1)


def test_a_copy_that_is_missing_is_blamed_though_its_value_exists_elsewhere() -> None:
    """A target network keeps its older weight `t`; the trained weight `p` is right on both sides."""
    update = CallSite(None, "update")
    trained = [call("mul p g -> w", update), call("mul q g -> v", update)]
    copies = [call("copy_ t w -> w", update), call("copy_ s v -> v", update)]
    culprit = find_culprit([[*trained, *copies]], [[*trained, copies[1]]], {0: [("w", "t")]})
    assert culprit is not None
    assert (culprit.how, culprit.call, culprit.reference) == ("lacks", copies[0], 2)
    assert find_culprit([[*trained, *copies]], [[*trained, *copies]], {0: [("w", "t")]}) is None, "no copy is missing"


def test_a_sum_of_equal_terms_that_is_missing_is_blamed_and_not_the_number_of_what_follows() -> None:
    """Over two ranks the sum of g is 2 g, and half of that is g again: calls are compared by origin, not by value."""

    def div(text: str, by: int) -> Call:
        return call(f"div {text}", BACKWARD)._replace(scalars=(("other", str(by)),))

    first, summed = call("mul x w -> g", BACKWARD), call("all_reduce g -> s", BACKWARD, collective=True)
    reference = logged([(), (0,), (1,), (2,)], [first, summed, div("s -> g", 2), div("g -> r", 8)])
    candidate = logged([(), (0,), (1,)], [first, div("g -> H", 2), div("H -> R", 8)])
    culprit = find_culprit([reference] * 2, [candidate] * 2, {0: [("r", "R")]})
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("lacks", None, 1)
    assert culprit.chain[0].call == reference[1]


def test_of_two_extra_calls_the_one_whose_value_a_call_of_the_reference_reads_comes_first() -> None:
    """The other one may be another way to right values."""
    reference = [call("neg x -> b"), call("sum b -> s"), call("add a s -> c"), call("mm c w -> d")]
    candidate = [call("neg x -> b"), call("tanh a -> T"), call("drop b -> B"), call("sum B -> S")]
    culprit = blamed(reference, [*candidate, call("sub T a S -> C"), call("mm C w -> D")], "D")
    assert culprit is not None and culprit.call.operator == "drop"


def test_an_extra_call_in_a_chain_of_extra_calls_without_a_place_has_the_place_of_their_reader() -> None:
    nowhere = CallSite(None, None)
    low, high = call("_to_copy b -> B1", nowhere), call("_to_copy B1 -> B2", nowhere)
    candidate = logged([(None, None), (0,), (1,), (2,)], [STEP[0], STEP[1], low, high])
    candidate[2] = candidate[2]._replace(producers=(1,))
    candidate += logged([(3,)], [call("sum B2 -> L")])
    candidate[3] = candidate[3]._replace(producers=(2,))
    culprit = blamed(STEP, candidate, "L")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.call.place) == ("adds", 2, FORWARD)


def test_a_path_of_very_many_calls_is_walked_to_its_end() -> None:
    reference = [call(f"neg v{i} -> v{i + 1}")._replace(producers=(i - 1 if i else None,)) for i in range(5000)]
    candidate = [reference[0]._replace(outputs=("V1",))]
    candidate += [each._replace(inputs=(f"V{i}",), outputs=(f"V{i + 1}",)) for i, each in enumerate(reference) if i]
    culprit = find_culprit([reference], [candidate], {0: [("v5000", "V5000")]})
    assert culprit is not None and (culprit.how, culprit.candidate) == ("computes", 0)


def test_a_slice_of_the_wrong_half_is_blamed_at_the_place_of_the_split_that_it_replaces() -> None:
    near = CallSite("layers.0.norm", "forward")
    reference = [call("split a -> b c")._replace(view=True), call("exp c -> d", near)._replace(producers=(0,))]
    candidate = [call("slice a -> b", near)._replace(view=True), call("exp b -> D", near)._replace(producers=(0,))]
    reference, candidate = (
        [each._replace(producers=each.producers or (None,)) for each in log] for log in (reference, candidate)
    )
    culprit = blamed(reference, candidate, "D")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.call.place) == ("adds", 0, FORWARD)
    assert culprit.instead_of == "split"


def test_a_slice_that_is_made_once_for_two_modules_has_the_place_of_the_first_split_that_it_replaces() -> None:
    places = [CallSite(f"layers.{number}", "forward") for number in (0, 1)]
    splits = [call("split a -> b c", place)._replace(view=True, producers=(None,)) for place in places]
    merged = call("slice a -> b", CallSite("", "forward"))._replace(view=True, producers=(None,))
    reference = [splits[0], call("exp x c -> d", places[0])._replace(producers=(None, 0))]
    reference += [splits[1], call("exp d c -> e", places[1])._replace(producers=(1, 2))]
    candidate = [merged, call("exp x b -> D", places[0])._replace(producers=(None, 0))]
    candidate += [call("exp D b -> E", places[1])._replace(producers=(1, 0))]
    culprit = blamed(reference, candidate, "E")
    assert culprit is not None and (culprit.candidate, culprit.call.place) == (0, places[0])


def test_a_wrong_number_is_tried_after_the_draw_that_python_may_have_read_it_from() -> None:
    def select(made: str, index: int) -> Call:
        return call(f"select x -> {made}")._replace(scalars=(("index", str(index)),))

    draws = [call(f"randperm -> {made}")._replace(draws=True) for made in "pP"]
    reference = [draws[0], select("r", 3), call("sum r -> l")]
    candidate = [draws[1], select("R", 5), call("sum R -> L")]
    logs = blame.ready_logs([with_producers(reference)], [with_producers(candidate)])
    found = blame.culprits_in(logs, {0: [("l", "L")]})
    assert [culprit.candidate for culprit in found] == [0, 1]
    read = [*candidate[:1], call("neg P -> n"), *candidate[1:]]
    culprit = find_culprit([[reference[0], call("neg P -> n"), *reference[1:]]], [read], {0: [("l", "L")]})
    assert culprit is not None and culprit.candidate == 2, "a call reads the draw, so Python need not have"
    scaled = [
        log[1]._replace(operator="mul", scalars=(("other", other),))
        for log, other in zip((reference, candidate), ("0.5", "0.25"), strict=True)
    ]
    culprit = find_culprit(
        [[draws[0], scaled[0], reference[2]]], [[draws[1], scaled[1], candidate[2]]], {0: [("l", "L")]}
    )
    assert culprit is not None and culprit.candidate == 1, "a fraction that `item()` has not read is the code's own"
    item = [call(f"_local_scalar_dense {made} -> number_{made}") for made in "pP"]
    culprit = find_culprit([[draws[0], *reference[1:]]], [[draws[1], item[1], *candidate[1:]]], {0: [("l", "L")]})
    assert culprit is not None and culprit.candidate == 0, "`item()` reads it for Python"
    memory = [[log[0]._replace(draws=False), *log[1:]] for log in (reference, candidate)]
    culprit = find_culprit([memory[0]], [memory[1]], {0: [("l", "L")]})
    assert culprit is not None and culprit.candidate == 1, "other values that no call reads, such as new memory, differ"


def test_a_record_that_lacks_a_sum_with_zeros_has_the_missing_sum_as_its_cause() -> None:
    """The second gradient is zeros, so the candidate has the sum's value: it is that of the first gradient."""
    reference = [call("mm x w -> g"), call("mm y w -> z"), call("add_ g z -> g", BACKWARD)]
    culprit = find_culprit([reference], [reference[:2]], {0: [("g", "z")]})
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("lacks", None, 2)


def test_a_call_that_reads_the_other_chunk_s_part_is_blamed_and_a_view_that_takes_it_for_both_is_too() -> None:
    chunk_1 = FORWARD._replace(chunk=1)

    def calls(read: str, total: str) -> list[Call]:
        parts = [call(f"slice x -> {part}")._replace(view=True) for part in "pq"]
        return [*parts, call("neg p -> n"), call("silu q -> r", chunk_1), call(f"add {read} r -> {total}", chunk_1)]

    split = call("split x -> p q")._replace(view=True)
    reference = [split, *calls("q", "s")[2:]]
    culprit = blamed(reference, calls("p", "S"), "S")
    assert culprit is not None and (culprit.how, culprit.candidate, culprit.reference) == ("reads", 4, 3)
    assert blamed(reference, calls("q", "s"), "s") is None
    both = [call("slice x -> p")._replace(view=True), call("neg p -> n"), call("silu p -> R", chunk_1)]
    culprit = blamed(reference, [*both, call("add p R -> S", chunk_1)], "S")
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("adds", "slice")


def test_a_call_that_needs_a_wrong_input_s_shape_alone_does_not_make_it_right() -> None:
    """The gradient of a loss has the shape of the log-probabilities, and none of their values."""
    reference = [call("log_softmax x -> a"), call("nll a y -> l"), call("nll_backward a y -> g", BACKWARD)]
    rounded = [call("log_softmax x -> a"), call("_to_copy a -> A"), call("nll A y -> L")]
    culprit = blamed(reference, [*rounded, call("nll_backward A y -> g", BACKWARD)], "L")
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("adds", "_to_copy")


def test_a_stage_that_takes_another_message_is_blamed_if_the_messages_were_sent_in_their_order() -> None:
    def logs(tags: tuple[str, str], values: str, made: str) -> list[list[Call]]:
        sent = [
            call(f"send {x} -> {x}", collective=True)._replace(peers=(1, 0), outputs=(), tag=tag)
            for x, tag in zip("ab", "01", strict=True)
        ]
        got = [
            call(f"recv_ e -> {x}", collective=True)._replace(peers=(1, 0), tag=tag)
            for x, tag in zip(values, tags, strict=True)
        ]
        scaled = [call(f"mul {x} k{i} -> {y}") for i, (x, y) in enumerate(zip(values, made, strict=True))]
        return [[got[0], scaled[0], got[1], scaled[1]], [call("neg x -> a"), call("neg y -> b"), *sent]]

    culprit = find_culprit(logs(("0", "1"), "ab", "pq"), logs(("1", "0"), "ba", "PQ"), {0: [("p", "P")]})
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.rank, culprit.candidate) == ("reads", "recv_", 0, 0)


def test_a_gradient_that_an_extra_call_rightly_sums_but_that_is_not_joined_leads_to_the_call_that_joins() -> None:
    """The record has this rank's sum, which the reference computes in place, and not the sum over ranks."""
    mine = [call("mm x w -> a", BACKWARD), call("mm y w -> b", BACKWARD), call("recv e -> r", collective=True)]
    update = CallSite(None, "update")
    reference = [*mine, call("add_ a b -> s", BACKWARD), call("join s r -> g", update), call("sgd p g -> q", update)]
    candidate = [*mine, call("add a b -> s", BACKWARD), call("join s r -> g", update), call("sgd p s -> Q", update)]
    culprit = find_culprit([reference], [candidate], {0: [("g", "s"), ("q", "Q")]}, (0, ("g", "s")))
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.candidate, culprit.reference) == ("misplaces", "join", 4, 4)
