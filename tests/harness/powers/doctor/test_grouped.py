"""Products by groups, their backward, and experts without rows: each check fails where what it checks is broken."""

from __future__ import annotations

import math

import pytest
import torch

from bitproof.harness.powers.doctor import grouped
from bitproof.harness.powers.doctor.grouped import check_grouped_mm, check_no_rows
from bitproof.harness.powers.doctor.setting import Setting

CPU = Setting(device="cpu", ranks=1)


class Broken(torch.autograd.Function):
    """Grouped products with a defect in their backward, done by a subclass."""

    @staticmethod
    def forward(ctx, rows, weights, ends):
        ctx.save_for_backward(rows, weights, ends)
        return right(rows, weights, offs=ends)

    @classmethod
    def gradients(cls, ctx, upstream):
        rows, weights, ends = ctx.saved_tensors
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        parts = list(zip(rows.split(counts), weights, upstream.split(counts), strict=True))
        rows_grad = torch.cat([up @ weight.T for _, weight, up in parts])
        return rows_grad, torch.stack([part.T @ up for part, _, up in parts]), counts


right = torch.nn.functional.grouped_mm


class OtherOrder(Broken):
    calls = 0

    @staticmethod
    def backward(ctx, upstream):
        OtherOrder.calls += 1
        rows, weights, _counts = Broken.gradients(ctx, upstream)
        return rows, weights * (1 + 2**-7 * (OtherOrder.calls % 2)), None


class LeavesRows(Broken):
    @staticmethod
    def backward(ctx, upstream):
        rows, weights, counts = Broken.gradients(ctx, upstream)
        for expert, count in enumerate(counts):
            if not count:
                weights[expert] = LeavesRows.value
        return rows, weights, None


class OtherExpert(Broken):
    @staticmethod
    def backward(ctx, upstream):
        rows, weights, _counts = Broken.gradients(ctx, upstream)
        return rows.flip(0), weights, None


def replace(monkeypatch, function):
    monkeypatch.setattr(grouped.functional, "grouped_mm", lambda rows, weights, offs: function(rows, weights, offs))


@pytest.mark.parametrize("check", [check_grouped_mm, check_no_rows])
def test_grouped_products_pass_and_so_do_products_one_by_one(monkeypatch, check):
    assert check(CPU)[0]
    LeavesRows.value = 0.0
    replace(monkeypatch, LeavesRows.apply)
    assert check(CPU)[0]


def test_products_that_give_an_expert_another_ones_rows_fail(monkeypatch):
    replace(monkeypatch, lambda rows, weights, offs: right(rows.flip(0), weights, offs=offs))
    is_ok, found = check_grouped_mm(CPU)
    assert not is_ok and found.startswith("products, 4 experts without rows: off by ")


def test_a_backward_that_adds_in_another_order_the_second_time_fails(monkeypatch):
    replace(monkeypatch, OtherOrder.apply)
    is_ok, found = check_grouped_mm(CPU)
    assert not is_ok
    assert found.startswith("gradients of weights, 4 experts without rows: other bits the second time; largest error")


def test_a_backward_that_gives_rows_anothers_gradient_fails(monkeypatch):
    replace(monkeypatch, OtherExpert.apply)
    is_ok, found = check_grouped_mm(CPU)
    assert not is_ok and found.startswith("gradients of rows, 4 experts without rows: off by ")


@pytest.mark.parametrize(
    ("value", "reported"), [(2.0**-20, "a gradient that is not zero"), (math.nan, "a value that is not finite")]
)
def test_an_expert_without_rows_that_gets_what_memory_held_fails(monkeypatch, value, reported):
    LeavesRows.value = value
    replace(monkeypatch, LeavesRows.apply)
    is_ok, found = check_no_rows(CPU)
    assert not is_ok and f"; first 4 of 8 experts without rows: {reported}" in found


def test_products_that_are_nan_fail(monkeypatch):
    replace(monkeypatch, lambda rows, weights, offs: right(rows, weights, offs=offs) * math.nan)
    assert not check_grouped_mm(CPU)[0]
