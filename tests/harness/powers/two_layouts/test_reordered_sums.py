"""Sums in other orders: other bits by rounding alone, the same again from one seed, and nothing else."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.powers.two_layouts.reordered_sums import regrouped
from bitproof.harness.records.layout import Regroup


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, 64, generator=generator).to(dtype), torch.randn(64, 32, generator=generator).to(dtype)]


CALLS = {
    "mm": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(torch.ones(32), a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "sum": lambda a, b: a.sum(),
    "sum of a dim": lambda a, b: a.sum(1, keepdim=True),
    "mean": lambda a, b: a.mean(),
    "mean of dims": lambda a, b: a.mean((0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_sum_moves_by_rounding_and_by_the_same_of_one_seed(name):
    call, inputs = CALLS[name], matrices()
    plain, exact = call(*inputs), call(*(x.double() for x in inputs)) if name != "addmm" else None
    found = []
    for seed in (*range(8), 0):
        with regrouped(Regroup(seed=seed, parts=4), 0):
            found.append(call(*inputs))
    assert any(not torch.equal(other, plain) for other in found)
    assert torch.equal(found[0], found[-1])
    for other in found:
        assert other.shape == plain.shape and other.dtype == plain.dtype
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-4)
        if exact is not None:
            torch.testing.assert_close(other.double(), exact, rtol=1e-4, atol=1e-4)


def test_backward_is_taken_in_other_orders_too():
    a, b = (x.requires_grad_() for x in matrices())
    (a @ b).square().sum().backward()
    plain = a.grad.clone()
    a.grad = None
    with regrouped(Regroup(seed=1, parts=2), 0):
        (a @ b).square().sum().backward()
    assert not torch.equal(a.grad, plain)
    torch.testing.assert_close(a.grad, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a + b.T,
        lambda a, b: a[:, :2] @ b[:2],
        lambda a, b: a[:, :2].sum(1),
        lambda a, b: a.amax(1),
        lambda a, b: (a > 0).sum(),
        lambda a, b: a.long() @ b.long(),
    ],
)
def test_what_has_one_order_alone_keeps_its_bits(call):
    inputs = matrices()
    with regrouped(Regroup(seed=1, parts=4), 0):
        found = call(*inputs)
    assert torch.equal(found, call(*inputs))


def test_without_a_seed_nothing_changes():
    a, b = matrices()
    with regrouped(None, 0):
        assert torch.equal(a @ b, torch.mm(a, b))


def test_steps_before_the_first_keep_their_order():
    a, b = matrices()
    for step, is_other in ((1, False), (2, True)):
        with regrouped(Regroup(seed=1, parts=4, first_step=2), 0, lambda step=step: step):
            found = a @ b
        assert torch.equal(found, a @ b) is not is_other
