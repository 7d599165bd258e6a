"""What is told of a case that differs in nothing, or in what no call explains. More is in the tests of the command."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.records import NO_CALL, BlamedCall, CaseResult, ChainLink, Divergence, Verdict
from bitproof.harness.report.story import story_lines

TOY = Case(name="toy", family="toy", reference="a:b", candidate="a:c", steps=3, parallelism=Parallelism(world_size=2))


def test_a_case_without_a_verdict_is_no_equal_one() -> None:
    result = CaseResult(case=TOY, verdict=Verdict.ERROR, steps=3, world_size=2, device="cpu", backend="gloo")
    assert list(story_lines(result)) == ["toy: no difference: ERROR"]


def test_the_chain_from_the_call_to_blame_to_the_tensor_is_reported_call_by_call() -> None:
    links = [
        ChainLink(operator="mm", module="layers.0", direction="forward", rank=1, source="a.py:3"),
        ChainLink(operator="sum", module=None, direction="forward", rank=0, left_out=2),
    ]
    call = BlamedCall(operator="mm", module="layers.0", direction="forward", how="is wrong", rank=1, ranks="1")
    first = Divergence(step=0, rank=0, kind="loss", name="loss", call=replace(call, chain=links))
    result = CaseResult(case=TOY, verdict=Verdict.DIFFERENT, steps=3, world_size=2, device="cpu", backend="gloo")
    lines = list(story_lines(replace(result, first_divergence=first)))
    assert [line.split() for line in lines[-2:]] == [
        ["1", "mm", "layers.0", "forward", "a.py:3"],
        ["0", "sum", "the", "step", "itself", "forward", "2", "calls"],
    ]


def test_a_difference_that_no_call_explains_is_reported_as_such() -> None:
    first = Divergence(step=0, rank=1, kind="grad", name="weight")
    result = CaseResult(
        case=TOY,
        verdict=Verdict.DIFFERENT,
        steps=3,
        world_size=2,
        device="cpu",
        backend="gloo",
        differing_kinds=("grad",),
        first_divergence=first,
    )
    lines = ["toy: DIFFERENT (grad)", "  first divergence: step 0, rank 1, grad weight"]
    assert list(story_lines(replace(result, remarks=(NO_CALL,)))) == [
        *lines,
        "  to blame: no operator call explains it",
    ]
    assert list(story_lines(result)) == [*lines, "  to blame: not known, as no search for a call finished"], (
        "of two layouts, say"
    )
