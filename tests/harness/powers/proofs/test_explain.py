import pytest
import torch

from tests.harness.powers.proofs.toy_graphs import c10d, compare, randn

W, X = randn(4, 6), randn(4, 6)


def finding(reference, candidate):
    [answer] = compare(reference, candidate, W, X).answers
    return answer.finding


def nodes(shown):
    return [call.node for call in shown]


def reduced(x):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 2, "pairs"))


def test_sides_part_at_the_first_calls_that_have_no_partner():
    found = finding(lambda w, x: (w * x).sigmoid().exp(), lambda w, x: (w * x).tanh().exp())
    assert [nodes(first) for first in found.first] == [["sigmoid"], ["tanh"]]
    assert str(found.first[0][0]) == "aten.sigmoid `sigmoid` [4, 6] of `mul`, read by `exp`"


def test_an_addition_that_was_moved_is_shown_on_both_sides():
    late, early = (lambda w, x: reduced(w * x) + reduced(w - x)), (lambda w, x: reduced((w * x) + (w - x)))
    found = finding(late, early)
    assert [nodes(moved) for moved in found.moved] == [["add"], ["add"]]
    assert [call.operator for call in found.first[0]] == ["_c10d_functional.reduce_scatter_tensor"] * 2
    assert nodes(found.first[1]) == ["add"]


def test_joining_parts_that_both_sides_have_is_no_difference():
    found = finding(lambda w, x: torch.cat([w * x, w]).exp(), lambda w, x: torch.cat([w * x, w]).log())
    assert [nodes(first) for first in found.first] == [["exp"], ["log"]]


def test_operators_that_run_on_halves_are_named():
    whole = lambda w, x: (w.t() @ x.sigmoid()).exp()  # noqa: E731
    halves = lambda w, x: (w.t() @ torch.cat([x[:2].sigmoid(), x[2:].sigmoid()])).exp()  # noqa: E731
    assert compare(whole, halves, W, X).row_splits == ("sigmoid",)
    assert compare(whole, lambda w, x: (w.t() @ x.tanh()).exp(), W, X).row_splits == ()


def test_what_has_a_size_from_what_differs_is_no_second_place_where_sides_part():
    def counted(f):
        return lambda w, x: w.new_ones(f(x).gt(0).nonzero().shape[0]).sum() * (w + x)

    found = finding(counted(torch.sigmoid), counted(torch.tanh))
    assert [nodes(first) for first in found.first] == [["sigmoid"], ["tanh"]]


def chunked(call, chunks):
    return lambda w, x: torch.cat([call(w, part) for part in x.chunk(chunks)])


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(
    ("call", "reported"),
    [
        (lambda w, x: x @ w.t(), "aten.mm returns [4, 4] in the reference and [{}, 4] in the candidate"),
        (lambda w, x: x.exp() + w[0], "aten.exp returns [4, 6] in the reference and [{}, 6] in the candidate"),
    ],
)
def test_a_call_on_other_shapes_is_named_as_one_that_may_round_otherwise(call, reported, chunks):
    """In float32 products of rows, or of columns, differ on a CPU here, and so do sigmoid and gelu in chunks."""
    lines = finding(call, chunked(call, chunks)).lines()
    assert lines[-1] == f"{reported.format(4 // chunks)}: its kernel may round otherwise for another shape"


def test_columns_of_a_product_are_such_calls_and_what_rounds_each_element_by_itself_is_none():
    columns = lambda w, x: torch.cat([x @ part for part in w.t().chunk(2, 1)], 1)  # noqa: E731
    assert finding(lambda w, x: x @ w.t(), columns).reshaped is not None
    each = lambda w, x: x * w[0] + w[1]  # noqa: E731
    assert compare(each, chunked(each, 2), W, X).verdict == "PROVED"
    assert finding(lambda w, x: (w * x).exp(), lambda w, x: (w * x).sin()).reshaped is None
