"""Calls that are named beside the one to blame, as no value tells whether they are wrong in its place."""

from __future__ import annotations

import pytest

from bitproof.harness.localize.blame import find_culprit
from bitproof.harness.localize.logs.calls import Call
from tests.harness.localize.programs import answer, generate
from tests.harness.localize.test_blame import blamed, call, exchange


@pytest.mark.parametrize(
    "seed",
    [
        *(
            110030067,
            110073483,
            60000176,
            60000639,
            60000981,
            60001031,
            60001300,
            60001496,
            60001653,
            60004173,
            70030336,
        ),
        *(70001739, 70003118, 70003639, 70006154, 70006299, 70010059, 70025615, 70028783, 70034580, 70053022),
    ],
)
def test_where_values_do_not_tell_the_answer_says_so_and_has_the_planted_call(seed: int) -> None:
    """One that reads a right value and gives another, a view of what is written later, what takes a bucket apart."""
    scene = generate(seed)
    assert scene is not None
    culprit, told = answer(scene)
    assert culprit is not None and culprit.or_else and told == "undetermined"


def test_of_a_bucket_that_the_reference_does_not_have_what_takes_it_apart_is_named_too() -> None:
    def logs(part: str, record: str) -> list[Call]:
        packed = [call("cat a b -> K"), call("all_reduce K -> S", collective=True)]
        return [*packed, call(f"split S -> {part} t")._replace(view=True), call(f"mul {part} w -> {record}")]

    reference = [call("all_reduce a -> s", collective=True), call("all_reduce b -> t", collective=True)]
    reference.append(call("mul s w -> p"))
    assert blamed(reference, logs("s", "p"), "p") is None
    culprit = blamed(reference, logs("X", "P"), "P")
    assert culprit is not None and culprit.call.operator == "all_reduce"
    assert [str(each) for each in culprit.or_else] == [
        f"{operator} of layers.0 (forward) on rank 0" for operator in ("cat", "split")
    ]


def test_a_call_that_reads_what_the_reference_s_reads_as_often_is_not_doubted() -> None:
    """What read another right value makes one reader more of that, and one less of the other."""
    reference = [call("clone a -> a"), call("neg b -> n"), call("sum n -> s"), call("sum a -> t")]
    exchanged = [call("clone a -> a"), call("clone a -> a"), call("my_neg a -> N"), call("sum N -> S"), reference[-1]]
    culprit = blamed(reference, exchanged, "S")
    assert culprit is not None and [each.call.operator for each in culprit.or_else] == ["clone"]
    culprit = blamed(reference, exchanged[1:], "S")
    assert culprit is not None and culprit.or_else == ()


def test_an_update_that_leaves_a_gradient_as_it_was_is_not_doubted() -> None:
    """A fused optimizer names gradients among what it may write, and shows them unchanged after it."""

    def logs(scale: str, gradient: str, parameter: str) -> list[Call]:
        update = call(f"my_adamw_ p {gradient} -> {parameter} {gradient}")
        scaled = call(f"mul n -> {scale}")._replace(scalars=(("other", scale),))
        return [scaled, call(f"foreach_mul_ g {scale} -> {gradient}"), update]

    culprit = blamed(logs("c", "h", "q"), logs("C", "H", "Q"), "H")
    assert culprit is not None and culprit.call.operator == "mul"
    assert culprit.or_else == ()


def test_what_follows_a_pack_in_another_order_is_not_doubted_beside_it() -> None:
    """As norms of gradients that were exchanged before, which clipping reads in another order."""

    def step(first: str, second: str, record: str) -> list[Call]:
        packed = call("chunk_cat a b -> k" if record == "l" else "chunk_cat b a -> K")._replace(producers=(None, None))
        calls = [packed, call(f"split {packed.outputs[0]} -> {first} {second}")._replace(view=True, producers=(0,))]
        calls += [call(f"norm {x} -> n{x}")._replace(producers=(1,)) for x in (first, second)]
        stacked = "z" if record == "l" else "Z"
        calls.append(call(f"my_stack n{first} n{second} -> {stacked}")._replace(producers=(2, 3)))
        return [*calls, call(f"mul {first} {stacked} -> {record}")._replace(producers=(1, 4))]

    culprit = blamed(step("p", "q", "l"), step("q", "p", "L"), "L")
    assert culprit is not None and (culprit.how, culprit.call.operator) == ("exchanges", "chunk_cat")
    assert culprit.or_else == ()


def test_another_rank_s_call_may_be_doubted_whose_log_is_shorter() -> None:
    step = [call("neg x -> a"), call("neg y -> b"), call("mm a w -> c"), exchange("c", "r"), call("sum r -> l")]
    first = [*step[:2], *(call(f"look z -> Z{i}") for i in range(9)), call("mm b w -> C"), exchange("C", "R")]
    second = [*step[:2], call("mm b w -> C"), exchange("C", "R")]
    logs = [[*first, call("sum R -> L")], second]
    culprit = find_culprit([step, step[:4]], logs, {0: [("l", "L")]})
    assert culprit is not None and (culprit.rank, culprit.candidate, culprit.how) == (0, 11, "reads")
