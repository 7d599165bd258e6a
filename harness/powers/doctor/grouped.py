"""Checks of the grouped matrix products of experts in a mixture of experts, and of their gradients.

Experts without rows are included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from bitproof.harness.capture.digest import digest
from bitproof.harness.powers.doctor.setting import Answer, Setting

# E experts; R rows, sorted by expert; D dim, F hidden dim

DIM, HIDDEN_DIM = 64, 32
MAX_ERROR = 0.5
"""Tolerance for sums of at most 64 products of about 1, in bfloat16 (8 significant bits)."""
COUNTS_E = ([5, 0, 7, 0, 0, 3, 1, 0], [0] * 7 + [16], [2] * 8, [0, 16] + [0] * 6)
"""Numbers of rows per expert; each list is a test."""


def products(device: torch.device, counts_E: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of a grouped matrix product, and its gradients, as three tensors:

    - the result (R, F): each row times the weights of its expert;
    - the gradient of the rows (R, D);
    - the gradient of the weights (E, D, F).

    `counts_E` has the number of rows of each expert.
    """
    rows_RD, weights_EDF, upstream_RF = (x.to(device) for x in operands(counts_E))
    rows_RD.requires_grad_()
    weights_EDF.requires_grad_()
    # `grouped_mm` takes the end of each expert's rows.
    ends_E = torch.tensor(counts_E, device=device).cumsum(0).to(torch.int32)
    y_RF = functional.grouped_mm(rows_RD, weights_EDF, offs=ends_E)
    rows_grad, weights_grad = torch.autograd.grad(y_RF, (rows_RD, weights_EDF), upstream_RF)
    return y_RF.detach(), rows_grad, weights_grad


def operands(counts_E: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of `products`: rows (R, D), weights (E, D, F), and the gradient of the result (R, F).

    They are bfloat16 tensors on the CPU, drawn from a fixed seed.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(counts_E), DIM), (len(counts_E), DIM, HIDDEN_DIM), (sum(counts_E), HIDDEN_DIM))
    rows_RD, weights_EDF, upstream_RF = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return rows_RD, weights_EDF, upstream_RF


def one_by_one(counts_E: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same results as `products`, but computed expert by expert, in float32 on the CPU."""
    rows_RD, weights_EDF, upstream_RF = (x.float() for x in operands(counts_E))
    parts = [*zip(rows_RD.split(counts_E), weights_EDF, upstream_RF.split(counts_E), strict=True)]
    y_RF = torch.cat([rows @ weight for rows, weight, _ in parts])
    rows_grad = torch.cat([upstream @ weight.T for _, weight, upstream in parts])
    return y_RF, rows_grad, torch.stack([rows.T @ upstream for rows, _, upstream in parts])


def check_grouped_mm(setting: Setting) -> Answer:
    """Check that grouped products and their gradients repeat their bits, and have the right values.

    Each element may differ by less than `MAX_ERROR` from the float32 result of `one_by_one`.
    """
    device, lines, wrong = setting.device_of(0), [], []
    for counts_E in COUNTS_E:
        first, second, wanted = products(device, counts_E), products(device, counts_E), one_by_one(counts_E)
        errors = [(x.float().cpu() - y).abs().max().item() for x, y in zip(first, wanted, strict=True)]
        empty = counts_E.count(0)
        for what, error, x, again in zip(_WHAT, errors, first, second, strict=True):
            if digest(x) != digest(again):
                wrong.append(f"{what}, {empty} experts without rows: other bits the second time")
            # A comparison with NaN is false, so NaN needs a question of its own.
            if math.isnan(error) or error >= MAX_ERROR:
                wrong.append(f"{what}, {empty} experts without rows: off by {error:.2g}")
        lines.append(f"{empty} empty: {max(errors):.2g}")
    first_wrong = f"{wrong[0]}; " if wrong else ""
    return not wrong, f"{first_wrong}largest error against products one by one, experts {', '.join(lines)}"


_WHAT = ("products", "gradients of rows", "gradients of weights")


def check_no_rows(setting: Setting) -> Answer:
    """Check that the weight gradients of experts without rows are zero, not uninitialized memory.

    All other results must be finite. A second test has no rows at all, as on a rank that receives none.
    """
    device, wrong = setting.device_of(0), []
    for counts_E in (*COUNTS_E, [0] * 8):
        # The kernel's output probably gets this memory: what it does not write is NaN then.
        poison(device, counts_E)
        y_RF, rows_grad, weights_grad = products(device, counts_E)
        text = f"{counts_E.count(0)} of {len(counts_E)} experts without rows"
        shapes = (tuple(y_RF.shape), tuple(rows_grad.shape))
        if shapes != ((sum(counts_E), HIDDEN_DIM), (sum(counts_E), DIM)):
            wrong.append(f"{text}: shapes {shapes}")
        if not all(x.isfinite().all().item() for x in (y_RF, rows_grad, weights_grad)):
            wrong.append(f"{text}: a value that is not finite")
        # An expert without rows adds nothing to the loss, so its gradient is exactly zero.
        idle = [expert for expert, count in enumerate(counts_E) if not count]
        if weights_grad[idle].count_nonzero().item():
            wrong.append(f"{text}: a gradient that is not zero")
    first = f"; first {wrong[0]}" if wrong else ""
    return not wrong, f"{len(COUNTS_E) + 1} ways to share rows, {len(wrong)} wrong{first}"


def poison(device: torch.device, counts_E: list[int]) -> None:
    # The tensor is freed at once, and the next tensor of this size probably gets its memory.
    for like in operands(counts_E):
        torch.full(like.shape, math.nan, dtype=like.dtype, device=device)
