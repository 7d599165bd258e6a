"""What bounds of two layouts make of a difference: the remark about one that is nearer than rounding comes."""

from __future__ import annotations

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare.layout_verdict import told_near
from bitproof.harness.compare.verdict import judge
from bitproof.harness.records import Comparison, LayoutBounds, LayoutRow, Verdict

CASE = Case(
    name="mine", family="mine", reference="a:b", candidate="a:c", steps=1, parallelism=Parallelism(world_size=2, ep=1)
)


def row(name: str, used: float, kind: str = "grad") -> LayoutRow:
    return LayoutRow(step=0, kind=kind, name=name, error=used * 1e-6, bound=1e-6)


def bounds(*rows: LayoutRow, near: int) -> LayoutBounds:
    return LayoutBounds(across=1, exact=0, regrouped=9, samples=12, confidence=0.99, rows=[*rows], near=near)


def test_the_module_that_uses_most_of_its_bounds_is_named_beside_all_others():
    rows = row("1.norm.weight", 0.85), row("1.norm.bias", 0.66), row("1.up.weight", 0.2), row("loss", 0.1, "loss")
    assert told_near(bounds(*rows, near=2)) == (
        "a small defect is possible: 2 tensors differ by more than rounding usually does, most of all 2 tensors of "
        "1.norm, by up to 85% of the bound; elsewhere at most 20%"
    )


def test_a_loss_is_of_the_step_itself():
    told = told_near(bounds(row("loss", 0.94, "loss"), row("1.up.weight", 0.1), near=1))
    assert told is not None and "1 tensor of the step itself (loss loss), by up to 94%" in told


def test_what_rounding_usually_does_is_no_remark():
    assert told_near(bounds(row("1.norm.weight", 0.23), near=0)) is None
    assert told_near(bounds(row("loss", 0.47, "loss"), near=1)) is None, "one tensor"
    assert told_near(bounds(row("1.norm.weight", 0.47), row("1.norm.bias", 0.45), near=2)) is not None


def test_close_never_hides_it_and_different_needs_no_such_remark():
    found = Comparison(verdict=Verdict.DIFFERENT, compared={"grad": 1}, mismatched={"grad": 1})
    near = judge(CASE, found, layouts=bounds(row("1.norm.weight", 0.85), near=1))
    assert near.verdict == Verdict.CLOSE and any("a small defect is possible" in remark for remark in near.remarks)
    far = judge(CASE, found, layouts=bounds(row("1.norm.weight", 1.5), row("1.norm.bias", 0.9), near=1))
    assert far.verdict == Verdict.DIFFERENT and not any("small defect" in remark for remark in far.remarks)
