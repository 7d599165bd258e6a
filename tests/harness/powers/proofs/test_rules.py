"""Each rule on the smallest step that needs it, beside the nearest step that only looks like it."""

import functools
import importlib

import pytest
import torch

from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.rules import RULES
from tests.harness.powers.proofs.toy_graphs import aten, c10d, compare, randn, verdict
from tests.sweeps import sweep

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
def test_operands_of_what_distinguishes_zeros_by_order_do_not_change_places(op):
    assert verdict(lambda w, x: op(w, x), lambda w, x: op(w, x), W, X) == ONE
    assert verdict(lambda w, x: op(w, x), lambda w, x: op(x, w), W, X) == OTHER


def test_a_product_and_a_sum_that_are_rounded_once_are_equal_to_nothing_but_themselves():
    """Compiled code rounds `prims.fma` once, torch's own kernel twice: nothing goes through it, and no number changes
    it."""
    importlib.import_module("torch._inductor.inductor_prims")
    fma = torch.ops.prims.fma.default
    once = lambda w, x, y: fma(w, x, y)  # noqa: E731
    assert verdict(once, lambda w, x, y: fma(w, x, y), W, X, Y) == ONE
    assert verdict(lambda w, x, y: fma(w * 1.0, x, y) * 1.0, once, W, X, Y) == ONE
    for other in (
        lambda w, x, y: w * x + y,
        lambda w, x, y: fma(x, w, y),
        lambda w, x, y: fma(w, x, y + 0.0),
        lambda w, x, y: -fma(-w, x, -y),
        lambda w, x, y: torch.cat([fma(w[:2], x[:2], y[:2]), fma(w[2:], x[2:], y[2:])]),
        lambda w, x, y: fma(w.t(), x.t(), y.t()).t(),
        lambda w, x, y: fma(w, x.t().contiguous().t(), y),
        lambda w, x, y: fma(w.double(), x.double(), y.double()).float(),
    ):
        assert verdict(once, other, W, X, Y) == OTHER
    ones = torch.ones_like
    assert verdict(lambda w, x, y: fma(w, ones(x), y), lambda w, x, y: w + y, W, X, Y) == OTHER
    a = torch.tensor(1 + 2**-12)
    rounded_once = (a.double() * a.double() - 1.0).float()
    assert rounded_once != a * a - 1.0, "which is why"


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


# -- numbers, signs, casts and choices: on every number of 16 bits -------------------------------------

BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
"""Zeros of either sign, denormals, infinities and every NaN, beside all others."""

SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00]  # zeros, denormals and ones
SPECIAL += [0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0xFF80, 0x4249]  # ones, largest numbers and infinities

SOUND = {
    "exact_of_neutral": (
        (lambda w, x: (w + x) * 1.0, lambda w, x: w + x),
        (lambda w, x: (w * x) / 1, lambda w, x: w * x),
        (lambda w, x: (w * x) + -0.0, lambda w, x: w * x),
        (lambda w, x: (w * x) - 0.0, lambda w, x: w * x),
        (lambda w, x: (w * x) - 0, lambda w, x: torch.ones_like(w) * (w * x)),
    ),
    "exact_of_neg": (
        (lambda w, x: (w + x).neg().neg(), lambda w, x: w + x),
        (lambda w, x: (w + x) * -1, lambda w, x: -(w + x)),
        (lambda w, x: (-w) * x, lambda w, x: -(w * x)),
        (lambda w, x: (w * x) * -0.0, lambda w, x: -((w * x) * 0.0)),
        (lambda w, x: (-(w * x)).float(), lambda w, x: -((w * x).float())),
        (lambda w, x: (-(w.float() * x.float())).to(w.dtype), lambda w, x: -((w.float() * x.float()).to(w.dtype))),
    ),
    "exact_difference": ((lambda w, x: w - x, lambda w, x: w + -x), (lambda w, x: w - (-x), lambda w, x: w + x)),
    "exact_twice": (
        (lambda w, x: (w + x) + (w + x), lambda w, x: 2 * (w + x)),
        (lambda w, x: (w * x) - -(w * x), lambda w, x: (w * x) / 0.5),
    ),
    "exact_through_wider": (
        (lambda w, x: (w + x).float().to(w.dtype), lambda w, x: w + x),
        (lambda w, x: (w + x).double().to(w.dtype), lambda w, x: w + x),
        (lambda w, x: (w * x).double().float(), lambda w, x: (w * x).float()),
        (lambda w, x: (w * x).float().double().to(torch.float16), lambda w, x: (w * x).to(torch.float16) * 1.0),
    ),
    "exact_of_one_choice": (
        (lambda w, x: torch.where(w > x, w * x, w * x), lambda w, x: w * x),
        (lambda w, x: torch.where(torch.ones(w.shape, dtype=torch.bool), w * x, x), lambda w, x: w * x),
    ),
    "exact_of_number": (
        (lambda w, x: (w * x) * -torch.full_like(w, 3.0), lambda w, x: (w * x) * -3),
        (lambda w, x: (w * x).float() * torch.full_like(w, 0.5).float(), lambda w, x: (w * x).float() / 2),
    ),
    "view_of_exact": (
        (lambda w, x: (w < x)[:9], lambda w, x: w[:9] < x[:9]),
        (lambda w, x: torch.where(w < x, w, x)[3:9], lambda w, x: torch.where(w[3:9] < x[3:9], w[3:9], x[3:9])),
        (lambda w, x: ~((w <= x) & (w != x))[3:9], lambda w, x: ~((w[3:9] <= x[3:9]) & (w[3:9] != x[3:9]))),
        (lambda w, x: ((w * x) * 0.25)[5:], lambda w, x: (w[5:] * x[5:]) / 4),
        (lambda w, x: (w - x).pow(2)[5:], lambda w, x: (w[5:] - x[5:]) * (w - x)[5:]),
        (lambda w, x: ((w - x) ** 2.0)[:, :3], lambda w, x: (w[:, :3] - x[:, :3]).square()),
    ),
    "move_of_flip": ((lambda w, x: (w * x).flip(0).flip(-2), lambda w, x: w * x),),
}
"""By rule, functions of two tensors that give equal bits wherever no result is a NaN."""

UNSOUND = [
    (lambda w, x: (w * x) + 0.0, lambda w, x: w * x),
    (lambda w, x: (w * x) * 1.0078125, lambda w, x: w * x),
    (lambda w, x: 0.0 - (w * x), lambda w, x: -(w * x)),
    (lambda w, x: -(w - x), lambda w, x: x - w),
    (lambda w, x: (-w) + (-x), lambda w, x: -(w + x)),
    (lambda w, x: functools.reduce(torch.add, [w * x] * 7), lambda w, x: 7 * (w * x)),
    (lambda w, x: w.bfloat16() * 0.1, lambda w, x: w.bfloat16() * torch.full_like(w, 0.1, dtype=torch.bfloat16)),
    (lambda w, x: (w * x) * 2 * 0.5, lambda w, x: w * x),
    (lambda w, x: w.float() / 3, lambda w, x: w.float() * (1 / 3)),
    (lambda w, x: (w.float() * 1.1).bfloat16().float(), lambda w, x: w.float() * 1.1),
    (lambda w, x: (w.float() * 1.1).half().bfloat16(), lambda w, x: (w.float() * 1.1).bfloat16()),
    (lambda w, x: (w.float() * 1.1).bfloat16().half(), lambda w, x: (w.float() * 1.1).half()),
    (lambda w, x: torch.where(w > x, w, x), lambda w, x: torch.where(w >= x, w, x)),
    (lambda w, x: torch.where(torch.zeros(w.shape, dtype=torch.bool), w, x), lambda w, x: w),
    (lambda w, x: (w * x).flip(0).flip(1), lambda w, x: w * x),
    (lambda w, x: (w * x).flip(0), lambda w, x: w * x),
    (lambda w, x: w < x, lambda w, x: x > w),
    (lambda w, x: ~(w < x), lambda w, x: w >= x),
    (lambda w, x: (w * x).pow(3), lambda w, x: (w * x) * (w * x) * (w * x)),
    (lambda w, x: (w * x).pow(1), lambda w, x: (w * x) * (w * x)),
]
"""The nearest functions whose bits differ somewhere, and two that no rule makes one."""


def all_pairs(dtype):
    """Every number of 16 bits beside some that are special, as two tensors."""
    special = torch.tensor([x - 2**16 * (x >> 15) for x in SPECIAL], dtype=torch.int16)
    shape = len(BITS), len(SPECIAL)
    return [x.expand(shape).contiguous().view(dtype) for x in (BITS[:, None], special[None, :])]


def bits_agree(one, two, dtype):
    """Whether two functions give equal bits, NaNs aside, of operands that lie in rows, in columns, and apart."""
    w, x = all_pairs(dtype)
    apart = torch.zeros(2, *w.shape, dtype=dtype)
    apart[0], apart[1] = w, x
    columns = [y.t().contiguous().t() for y in (w, x)]
    step = apart.permute(1, 2, 0).contiguous()
    layouts = [(w, x), columns, (w, columns[1]), (step[..., 0], step[..., 1])]
    found = [f(*y) for f in (one, two) for y in layouts]
    return all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", sweep([torch.bfloat16, torch.float16], torch.float16))
@pytest.mark.parametrize("rule", SOUND)
def test_a_rule_keeps_every_bit_of_every_number_of_16_bits_in_every_layout(rule, dtype):
    small = [x[:12, :4].clone() for x in all_pairs(dtype)]
    for one, two in SOUND[rule]:
        assert rule in used(one, two, *small)
        assert bits_agree(one, two, dtype)


@pytest.mark.parametrize("dtype", sweep([torch.bfloat16, torch.float16, torch.float32], torch.float32))
@pytest.mark.parametrize(("one", "two"), UNSOUND)
def test_what_is_nearly_such_a_rule_is_not_proved(one, two, dtype):
    small = [x[:12, :4].clone().to(dtype) for x in all_pairs(torch.float16)]
    answers = compare(one, two, *small, must_read=()).answers
    assert [answer.verdict for answer in answers] == [OTHER]


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.lt, torch.ge, torch.eq])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_beside_32_bits_is_a_tensor_of_it_in_every_layout_and_at_every_length(op, dtype):
    both = [lambda w, x: op(w * x, 0.1)[1:], lambda w, x: op((w * x)[1:], torch.full((3, 6), 0.1, dtype=dtype))]
    assert verdict(*both, W.to(dtype), X.to(dtype)) == ONE
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 7, 8, 15, 16, 31, 33, 1000):
        w = torch.exp2(torch.randn(length, 3, generator=generator, dtype=dtype) * 40) * 0.1
        w[0, 0], w[-1, -1] = 0.1, 2.0**-149
        expected = op(w, torch.full_like(w, 0.1))
        for y in (w, w.t().contiguous().t(), torch.stack([w, w])[1], torch.stack([w, w], -1)[..., 0]):
            assert same_bits(op(y, 0.1), expected)
            assert same_bits(y.pow(2), w * w)
            if op in (torch.add, torch.sub, torch.mul):
                assert same_bits(getattr(y.clone(), f"{op.__name__}_")(0.1), expected)
        assert all(same_bits(op(x, 0.1), op(x[None], torch.full_like(x[None], 0.1))[0]) for x in w.reshape(-1)[:9])


def test_what_is_nearly_such_a_rule_differs_in_a_bit():
    equal = [place for place, pair in enumerate(UNSOUND) if bits_agree(*pair, torch.float16)]
    assert equal == [16], "w < x is x > w, and no rule says so"


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
