"""Each rule on the smallest step that needs it, beside the nearest step that only looks like it."""

import pytest
import torch

from bitproof.harness.prove.rules import RULES
from tests.harness.prove.toy_graphs import aten, c10d, compare, randn, verdict

W, X, Y = randn(4, 6), randn(4, 6), randn(4, 6) * 2
ONE, OTHER = "PROVED", "NOT PROVED"


def used(reference, candidate, *inputs, **options):
    """The rules by which two steps are proved; they must be."""
    proof = compare(reference, candidate, *inputs, **options)
    assert proof.verdict == ONE
    return proof.table.used()


def test_a_view_of_everything_is_what_it_views():
    assert "view_of_whole" in used(lambda w, x: w + x, lambda w, x: (w + x).view(24).view(4, 6), W, X)
    assert verdict(lambda w, x: w + x, lambda w, x: (w + x).t().reshape(4, 6), W, X) == OTHER


def test_a_view_of_a_view_is_one_view():
    assert "view_of_view" in used(lambda w, x: (w + x)[1:3, 2], lambda w, x: (w + x)[:, 2][1:][:2], W, X)
    assert verdict(lambda w, x: (w + x)[1:3, 2], lambda w, x: (w + x)[:, 2][:2], W, X) == OTHER


def test_a_view_looks_at_the_order_of_elements_and_not_at_their_shape():
    def in_dims(w, x):
        return (w + x).t().reshape(3, 2, 4).reshape(-1)[:5]

    def flat(w, x):
        return (w + x).t().reshape(24)[:5]

    assert "view_of_same_order" in used(in_dims, flat, W, X)
    assert verdict(in_dims, lambda w, x: (w + x).reshape(24)[:5], W, X) == OTHER


def test_what_is_added_may_be_viewed_before_or_after():
    assert "view_of_exact" in used(lambda w, x: (w * x)[:2], lambda w, x: w[:2] * x[:2], W, X)
    assert used(lambda w, x: (w * x[0])[:2].t(), lambda w, x: w[:2].t() * x[0, :, None], W, X)
    assert verdict(lambda w, x: (w * x)[:2], lambda w, x: w[:2] * x[2:], W, X) == OTHER


def test_what_is_summed_may_not_be_viewed_before_instead_of_after():
    assert verdict(lambda w, x: (w * x).sum(1)[:2], lambda w, x: (w * x)[:2].sum(1), W, X) == OTHER
    assert verdict(lambda w, x: (w * x).sigmoid()[:2], lambda w, x: (w * x)[:2].sigmoid(), W, X) == OTHER


def test_a_part_of_a_concatenation_is_that_part():
    def joined(w, x):
        return torch.cat([w, x])

    assert "view_of_cat" in used(lambda w, x: joined(w, x)[4:] + w, lambda w, x: x + w, W, X)
    assert used(lambda w, x: joined(w, x).view(2, 4, 6)[1] + w, lambda w, x: x + w, W, X)
    assert used(lambda w, x: joined(w, x)[2:6].view(-1), lambda w, x: torch.cat([w[2:], x[:2]]).view(-1), W, X)
    assert verdict(lambda w, x: joined(w, x)[3:7] + w, lambda w, x: x + w, W, X) == OTHER


def test_columns_that_were_joined_are_not_rows_that_were_joined():
    by_columns, by_rows = (lambda w, x, dim=dim: torch.cat([w, x], dim).reshape(8, 6) for dim in (1, 0))
    assert verdict(by_rows, lambda w, x: torch.cat([w, x]), W, X) == ONE
    assert verdict(by_columns, by_rows, W, X) == OTHER


def test_a_part_without_elements_is_nothing():
    assert "cat_of_nothing" in used(lambda w, x: torch.cat([w[:0], w, x[:0]]) + x, lambda w, x: w + x, W, X)
    assert verdict(lambda w, x: torch.cat([w[:1], w, x[:0]]), lambda w, x: torch.cat([w, w[:1]]), W, X) == OTHER
    nothing = lambda w, x: torch.cat([torch.cat([w[:, :0], w[:, :0]], 1), w + x], 1)  # noqa: E731
    assert verdict(nothing, lambda w, x: w + x, W, X) == ONE


def test_concatenations_along_one_dim_are_one():
    nested = lambda w, x: torch.cat([torch.cat([w, x]), w])  # noqa: E731
    assert "cat_of_cat" in used(nested, lambda w, x: torch.cat([w, x, w]), W, X)
    assert verdict(nested, lambda w, x: torch.cat([w, w, x]), W, X) == OTHER


def test_neighbours_that_are_joined_are_what_they_were_cut_from():
    assert "cat_of_neighbours" in used(lambda w, x: torch.cat([w[:2], w[2:]]) + x, lambda w, x: w + x, W, X)
    assert verdict(lambda w, x: torch.cat([w[2:], w[:2]]) + x, lambda w, x: w + x, W, X) == OTHER
    assert verdict(lambda w, x: torch.cat([w[:2], x[2:]]) + x, lambda w, x: w + x, W, X) == OTHER


def test_sums_of_neighbours_are_a_sum_whatever_the_order_of_either():
    def halves(w, x):
        return torch.cat([w[:2] + x[:2], x[2:] + w[2:]])

    assert verdict(halves, lambda w, x: w + x, W, X) == ONE
    assert verdict(lambda w, x: torch.cat([w[:2] - x[:2], x[2:] - w[2:]]), lambda w, x: w - x, W, X) == OTHER


def test_operands_of_sums_and_products_change_places_and_those_of_differences_do_not():
    assert "exact_in_order" in used(lambda w, x: w + x, lambda w, x: x + w, W, X)
    assert verdict(lambda w, x: w * x, lambda w, x: x * w, W, X) == ONE
    assert verdict(lambda w, x: w - x, lambda w, x: x - w, W, X) == OTHER
    assert verdict(lambda w, x: w / x, lambda w, x: x / w, W, X) == OTHER


def test_sums_are_not_regrouped():
    assert verdict(lambda w, x, y: (w + x) + y, lambda w, x, y: w + (x + y), W, X, Y) == OTHER
    assert verdict(lambda w, x, y: w * (x + y), lambda w, x, y: w * x + w * y, W, X, Y) == OTHER


@pytest.mark.parametrize("op", [torch.maximum, torch.minimum, torch.fmax, torch.atan2])
def test_operands_of_what_tells_zeros_apart_by_order_do_not_change_places(op):
    assert verdict(lambda w, x: op(w, x), lambda w, x: op(w, x), W, X) == ONE
    assert verdict(lambda w, x: op(w, x), lambda w, x: op(x, w), W, X) == OTHER


def test_what_is_added_to_a_concatenation_is_added_to_its_parts():
    whole = lambda w, x, y: torch.cat([w, x]) * torch.cat([y, y])  # noqa: E731
    assert "exact_of_cat" in used(whole, lambda w, x, y: torch.cat([w * y, x * y]), W, X, Y)
    assert verdict(whole, lambda w, x, y: torch.cat([w * y, x * w]), W, X, Y) == OTHER


def test_a_cast_is_exact_between_floats_and_opaque_elsewhere():
    def narrow(x, dtype):
        return x.to(dtype)

    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert verdict(lambda w, x: narrow(w + x, dtype)[:2], lambda w, x: narrow((w + x)[:2], dtype), W, X) == ONE
    for dtype in (torch.int32, torch.bool):
        assert verdict(lambda w, x: narrow(w + x, dtype)[:2], lambda w, x: narrow((w + x)[:2], dtype), W, X) == OTHER
    there_and_back = lambda w, x: (w + x).to(torch.bfloat16).to(torch.float32)  # noqa: E731
    assert verdict(there_and_back, lambda w, x: w + x, W, X) == OTHER


def gathered(x, group="pairs", size=2):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, size, group))


def summed(x, group="pairs", size=2, operation="sum"):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, operation, size, group))


def test_a_view_may_be_gathered_or_what_is_gathered_viewed():
    before = lambda w, x: gathered((w + x)[:2])  # noqa: E731
    after = lambda w, x: gathered(w + x).view(2, 4, 6)[:, :2].reshape(4, 6)  # noqa: E731
    assert "gather_of_view" in used(before, after, W, X)
    assert verdict(before, lambda w, x: gathered(w + x)[:4], W, X) == OTHER


def test_sums_may_be_gathered_or_what_is_gathered_summed():
    before, after = lambda w, x: gathered(w + x), lambda w, x: gathered(w) + gathered(x)
    assert "gather_of_exact" in used(before, after, W, X)
    assert verdict(lambda w, x: gathered(w.sigmoid()), lambda w, x: gathered(w).sigmoid(), W, X) == OTHER


def test_a_gathered_bucket_is_its_gathered_parts():
    def bucket(w, x):
        rows = gathered(torch.cat([(w * x).reshape(-1), (w - x).reshape(-1)])).view(2, -1)
        products, differences = aten.split_with_sizes_copy(rows, [24, 24], 1)
        return products.view(8, 6), differences.view(8, 6)

    assert "gather_of_cat" in used(bucket, lambda w, x: (gathered(w * x), gathered(w - x)), W, X)
    assert verdict(bucket, lambda w, x: (gathered(w - x), gathered(w * x)), W, X) == OTHER


def reduced_bucket(w, x):
    rows = summed(torch.cat([(w * x).reshape(2, -1), (w - x).reshape(2, -1)], 1))
    return rows.view(-1)[:12].view(2, 6), rows.view(-1)[12:].view(2, 6)


def test_a_reduced_bucket_is_its_reduced_parts():
    assert "reduce_of_cat" in used(reduced_bucket, lambda w, x: (summed(w * x), summed(w - x)), W, X)
    assert verdict(reduced_bucket, lambda w, x: (summed(w - x), summed(w * x)), W, X) == OTHER
    assert verdict(lambda w, x: summed(w) + summed(x), lambda w, x: summed(w + x), W, X) == OTHER


def test_a_bucket_joined_by_rows_reduces_other_rows():
    def by_rows(w, x):
        rows = summed(torch.cat([w * x, w - x]))
        return rows[:2], rows[2:]

    assert verdict(by_rows, by_rows, W, X) == ONE
    assert verdict(by_rows, lambda w, x: (summed(w * x), summed(w - x)), W, X) == OTHER


def reassociate(table, term):
    """Unsound, as a prover over the reals has it: (a + b) + c is sorted among all three."""
    *operator, operands = term
    if term[1] != "add":
        return None
    leaves = []
    for x in operands:
        leaves += table[x][-1] if table[x][:4] == tuple(operator) else [x]
    if len(leaves) < 3 or len(leaves) == len(operands):
        return None
    return table.make((*operator, tuple(sorted(leaves))))


def reassociate_over_ranks(table, term):
    """The same of the sum over ranks: a reduction of a sum is the sum of reductions."""
    _, place, operation, ranks = term
    if table[place][:2] != ("exact", "add"):
        return None
    *operator, operands = table[place]
    return table.make((*operator, tuple(sorted(table.make(("reduce", x, operation, ranks)) for x in operands))))


def forget_rounding(table, term):
    """Unsound, as over the reals: the cast of a sum is the sum of casts."""
    if term[1] != "cast" or table[term[4][0]][:2] != ("exact", "add"):
        return None
    _, _, dtype, device, [place] = term
    casts = sorted(table.make(("exact", "cast", dtype, device, (x,))) for x in table[place][4])
    return table.make(("exact", "add", dtype, device, tuple(casts)))


REGROUPING = {"exact": [reassociate, *RULES["exact"]], "reduce": [reassociate_over_ranks, *RULES["reduce"]]}
"""Our rules and one that is not sound, that additions may be regrouped: within a rank, and over ranks."""

REAL = REGROUPING | {"exact": [forget_rounding, *REGROUPING["exact"]]}
"""The same, where casts do not round either: what a prover over the real numbers has."""


def test_a_rule_that_regroups_sums_would_prove_what_is_not_equal():
    unsound = RULES | {"exact": [reassociate, *RULES["exact"]]}
    steps = (lambda w, x, y: (w + x) + y, lambda w, x, y: w + (x + y))
    assert verdict(*steps, W, X, Y, rules=unsound) == ONE
    assert verdict(*steps, W, X, Y) == OTHER
    big = torch.full_like(W, 2.0**30)
    assert not torch.equal(steps[0](W, big, -big), steps[1](W, big, -big))
