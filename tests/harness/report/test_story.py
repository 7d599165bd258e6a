"""What is told of a case that differs in nothing, or in what no call explains. More is in the tests of the command."""

from __future__ import annotations

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.records import CaseResult, Divergence, Verdict
from bitproof.harness.report.story import tell_story

TOY = Case(name="toy", family="toy", reference="a:b", candidate="a:c", steps=3, parallelism=Parallelism(world_size=2))


def test_a_case_without_a_verdict_is_no_equal_one() -> None:
    result = CaseResult(case=TOY, verdict=Verdict.ERROR, steps=3, world_size=2, device="cpu", backend="gloo")
    assert list(tell_story(result)) == ["toy: no difference: ERROR"]


def test_a_difference_that_no_call_explains_is_told_as_such() -> None:
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
    assert list(tell_story(result)) == [
        "toy: DIFFERENT (grad)",
        "  first divergence: step 0, rank 1, grad weight",
        "  to blame: no operator call explains it",
    ]
