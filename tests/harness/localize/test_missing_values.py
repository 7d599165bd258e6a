"""Whom blame finds where a right value is missing, or stands in another tensor's place."""

from __future__ import annotations

from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.logs.calls import Call, CallSite
from tests.harness.localize.test_blame import blamed, call, logged


def test_a_right_value_that_is_copied_over_another_in_a_bucket_is_blamed_on_the_copy() -> None:
    def log(parts: list[Call], values: str, bucket: tuple[str, str]) -> list[Call]:
        """Sums of two parts of a bucket, taken out of it one after the other."""
        summed = call(f"all_reduce {bucket[0]} -> {bucket[1]}", collective=True)
        summed = summed._replace(producers=(len(parts) - 1,), aliases=tuple(values))
        calls = [*parts, summed]
        for value in values:
            taken = call(f"as_strided {bucket[1]} -> {value}")._replace(view=True, producers=(len(parts),))
            calls += [taken, call(f"copy_ g {value} -> {value} {value}")._replace(producers=(None, len(calls)))]
        return calls

    filled = logged([(None,), (None,), (0, 1)], [call("neg x -> a"), call("neg y -> b"), call("cat a b -> k")])
    over = logged([(2,), (2, 2), (4, 3)], [call("clone a -> a"), call("copy_ a b -> b b"), call("copy_ b a -> a a")])
    reference, candidate = log(filled, "pq", ("k", "s")), log([*filled, *over], "qp", ("K", "S"))
    culprit = find_culprit([reference], [candidate], {0: [("p", "q"), ("q", "p")]})
    assert culprit is not None
    assert (culprit.how, culprit.call.operator, culprit.candidate) == ("adds", "copy_", 5)


def test_an_input_that_a_list_lacks_leads_to_the_call_that_should_have_computed_it() -> None:
    """A frozen parameter has no gradient, so clipping stacks a norm less."""
    norm = call("norm h -> m")
    reference = [call("mm x y -> g"), call("norm g -> n"), norm, call("stack m n -> s")]
    candidate = [norm, call("stack m -> S")]
    culprit = blamed(logged([(None, None), (0,), (None,), (2, 1)], reference), logged([(None,), (0,)], candidate), "S")
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("lacks", "mm")


def test_where_a_view_is_missing_for_a_call_that_is_missing_that_call_is_blamed() -> None:
    """What the view is made for; a part that is missing, as a slice, is missed itself."""
    for operator, missed in (("unsqueeze", "masked_fill"), ("slice", "slice")):
        reference = [
            call("lt x -> m"),
            call(f"{operator} m -> u")._replace(view=True),
            call("masked_fill e u -> a"),
            call("sum a -> l"),
        ]
        reference = logged([(None,), (0,), (None, 1), (2,)], reference)
        candidate = [reference[0], call("sum e -> L")._replace(producers=(None,))]
        culprit = blamed(reference, candidate, "L")
        assert culprit is not None and (culprit.how, culprit.call.operator) == ("lacks", missed)


def test_what_another_ranks_stage_computes_is_given_to_this_one_and_not_missed() -> None:
    """The reference has no stages: each of its ranks runs both layers."""
    first = [call("sin t -> a", CallSite("layers.0", "forward"))]
    second = [call("cos a -> b", CallSite("layers.1", "forward")), call("sum b -> l", CallSite("layers.1", "forward"))]
    reference = logged([(None,), (0,), (1,)], [*first, *second])
    of_first, of_second = (
        logged([(None,)], first),
        logged([(None,)], [call("sum B -> L", CallSite("layers.1", "forward"))]),
    )
    culprits = [
        find_culprit([reference, reference], candidate, {1: [("l", "L")]})
        for candidate in ([of_first, of_second], [of_second, of_second])
    ]
    assert [(x.how, x.call.operator) for x in culprits if x is not None] == [("lacks", "cos"), ("lacks", "sin")]


def test_a_call_that_takes_a_right_value_in_place_of_one_from_before_the_step_is_blamed_and_not_its_maker() -> None:
    """An extra `div`, whose own value nothing else has, leads to the value of the reference's `tanh`."""
    reference = logged(
        [(None,), (None, 0), (1,)], [call("tanh x -> t"), call("mm w t -> m"), call("mul_backward w -> g")]
    )
    candidate = logged(
        [(None,), (0,), (None, 1), (1,)],
        [call("exp x -> E"), call("div E -> t"), call("mm w t -> m"), call("mul_backward t -> G")],
    )
    reference[2] = reference[2]._replace(producers=(None,))
    culprit = blamed(reference, candidate, "G")
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("reads", "mul_backward")
