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
