"""What bounds of two layouts make of a difference, and what the second test, in float64, makes of one within them."""

from __future__ import annotations

from dataclasses import replace

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.powers.two_layouts.layout_verdict import first_beyond, remark_on_near, remarks_on
from bitproof.harness.records import Comparison, InFloat64, LayoutBounds, LayoutRow, Verdict
from tests.harness.judged import judge

CASE = Case(
    name="mine", family="mine", reference="a:b", candidate="a:c", steps=1, parallelism=Parallelism(world_size=2, ep=1)
)


def row(name: str, used: float, kind: str = "grad") -> LayoutRow:
    return LayoutRow(step=0, kind=kind, name=name, error=used * 1e-6, bound=1e-6)


def bounds(*rows: LayoutRow, near: int) -> LayoutBounds:
    return LayoutBounds(across=1, exact=0, regrouped=9, samples=12, confidence=0.99, rows=[*rows], near=near)


def test_the_module_that_uses_most_of_its_bounds_is_named_beside_all_others():
    rows = row("1.norm.weight", 0.85), row("1.norm.bias", 0.66), row("1.up.weight", 0.2), row("loss", 0.1, "loss")
    assert remark_on_near(bounds(*rows, near=2)) == (
        "a small defect is possible: 2 tensors differ by more than rounding usually does, most of all 2 tensors of "
        "1.norm, by up to 85% of the bound; elsewhere at most 20%"
    )


def test_a_loss_is_of_the_step_itself():
    text = remark_on_near(bounds(row("loss", 0.94, "loss"), row("1.up.weight", 0.1), near=1))
    assert text is not None and "1 tensor of the step itself (loss loss), by up to 94%" in text


def test_what_rounding_usually_does_is_no_remark():
    assert remark_on_near(bounds(row("1.norm.weight", 0.23), near=0)) is None
    assert remark_on_near(bounds(row("loss", 0.47, "loss"), near=1)) is None, "one tensor"
    assert remark_on_near(bounds(row("1.norm.weight", 0.47), row("1.norm.bias", 0.45), near=2)) is not None


FOUND = Comparison(verdict=Verdict.DIFFERENT, compared={"grad": 1}, mismatched={"grad": 1})
STAYS = LayoutRow(step=0, kind="grad", name="1.norm.weight", error=3e-7, bound=4e-12)


def judged(in_float64: InFloat64 | None, used: float = 0.85):
    return judge(CASE, FOUND, layouts=replace(bounds(row("1.norm.weight", used), near=1), in_float64=in_float64))


def test_what_stays_in_float64_is_different_though_it_is_within_its_bound():
    found = judged(InFloat64(beyond=2, rows=[STAYS]), used=0.05)
    assert found.verdict == Verdict.DIFFERENT
    assert found.error == (
        "in float64 the relative error of step 0, grad 1.norm.weight is still 3e-07, where sums in other orders "
        "explain 4e-12; 2 tensors are like this, and this is the first"
    )
    first = found.first_divergence
    assert first is not None and (first.step, first.kind, first.name) == (0, "grad", "1.norm.weight")
    assert any(remark.endswith("is of 1.norm (backward)") for remark in found.remarks)


def test_what_vanishes_in_float64_is_close_without_a_remark_however_near_its_bound_it_was():
    found = judged(InFloat64(rows=[replace(STAYS, error=1e-16)]), used=0.94)
    assert (found.verdict, found.error, [*found.remarks]) == (Verdict.CLOSE, None, [])
    assert first_beyond(bounds(row("1.norm.weight", 0.85), near=1), FOUND) is None


def test_what_stays_is_a_remark_if_one_side_may_have_rounded_numbers_from_outside():
    found = judged(InFloat64(beyond=1, rows=[STAYS], narrow="aten.mul.Tensor (train.py:12)"))
    assert found.verdict == Verdict.CLOSE
    (remark,) = found.remarks
    assert remark.startswith("a small defect is possible: in float64 the relative error of step 0, grad 1.norm.weight")
    assert "aten.mul.Tensor (train.py:12) is the first call that reads float numbers of fewer bits" in remark


def test_a_loss_of_accuracy_is_a_remark():
    (remark,) = judged(InFloat64(less_accurate=9.12)).remarks
    assert remark == (
        "the candidate is less accurate: against float64 its rounding error is 9.1 times the reference's, more than "
        "sums in other orders explain"
    )


def test_without_the_second_test_it_is_said_why_and_what_is_near_is_named():
    found = judged(InFloat64(failed="rank 0 of candidate raised; RuntimeError: expected Float"))
    assert found.verdict == Verdict.CLOSE
    first, second = found.remarks
    assert first.endswith(
        "so a defect as small as rounding may hide: rank 0 of candidate raised; RuntimeError: expected Float"
    )
    assert second.startswith("a small defect is possible: 1 tensors differ by more than rounding usually does")
    assert len(judged(InFloat64(failed="it raised"), used=0.1).remarks) == 1
    assert remarks_on(bounds(row("1.norm.weight", 0.1), near=0)) == []


def test_different_needs_no_such_remark():
    far = judge(CASE, FOUND, layouts=bounds(row("1.norm.weight", 1.5), row("1.norm.bias", 0.9), near=1))
    assert far.verdict == Verdict.DIFFERENT and not any("small defect" in remark for remark in far.remarks)
