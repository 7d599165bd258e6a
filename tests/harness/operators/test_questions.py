"""How the table of operators is asked."""

from bitproof.harness.operators import ROWS, Operator, known, named, names, overloads
from bitproof.harness.operators.row import Uninitialized


def test_a_row_of_its_own_comes_before_that_of_its_namespace_and_what_is_unknown_says_nothing() -> None:
    assert known("_c10d_functional.wait_tensor").launch is None
    assert known("_c10d_functional.of_tomorrow").launch is known("_c10d_functional.all_reduce").launch is not None
    assert known("aten.of_tomorrow") == Operator(name="aten.of_tomorrow")


def test_a_name_without_namespace_has_what_any_namespace_says() -> None:
    assert named("wait_tensor").returns == "tensor"
    assert named("empty").uninitialized is Uninitialized.WHOLE
    assert named("add").commutes
    assert not named("sub").commutes
    assert named("of_tomorrow") == Operator(name="of_tomorrow")
    assert named("*") == Operator(name="*", launch=ROWS["_c10d_functional.*"].launch)


def test_operators_are_found_by_a_column_with_their_overloads_or_without() -> None:
    assert names(lambda row: row.commutes and not row.exact) == {"maximum", "minimum"}
    assert {"aten.add.Tensor", "aten.neg.default", "aten.where.self"} <= overloads(lambda row: row.exact)
    assert "aten.div.Tensor" not in overloads(lambda row: row.exact)
    assert {"higher_order.flex_attention", "aten.sort.stable", "aten.sort.default"} <= overloads(
        lambda row: row.allowed
    )
