"""A fake grouped product has the real one's shape, dtype and strides, in float32 as in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm

import harness.graph  # noqa: F401  (teaches fake tensors)


def product_and_gradients(dtype: torch.dtype) -> list[Tensor]:
    """The forward (rows by weights, 2-D by 3-D) and both backward products (2-D by 3-D, 2-D by 2-D)."""
    rows_RD = torch.ones(10, 16, dtype=dtype, requires_grad=True)
    weights_EFD = torch.ones(3, 24, 16, dtype=dtype, requires_grad=True)
    ends_E = torch.tensor([4, 4, 10], dtype=torch.int32)
    y_RF = grouped_mm(rows_RD, weights_EFD.transpose(-2, -1), offs=ends_E)
    return [y_RF.detach(), *torch.autograd.grad(y_RF, [rows_RD, weights_EFD], torch.ones_like(y_RF))]


def layouts(values: list[Tensor]) -> list[object]:
    return [(x.dtype, x.shape, x.stride(), x.device) for x in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_layouts_are_the_real_ones(dtype: torch.dtype) -> None:
    real = product_and_gradients(dtype)
    with FakeTensorMode():
        fake = product_and_gradients(dtype)
    assert layouts(fake) == layouts(real)
    assert real[0].unique().tolist() == [16.0]


def test_other_dtypes_go_the_way_they_went() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="Expected inputs of BF16 type"):
        product_and_gradients(torch.float16)


def test_mixed_dtypes_stay_refused() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="Expected inputs of BF16 type"):
        grouped_mm(
            torch.ones(4, 16),
            torch.ones(1, 16, 8, dtype=torch.bfloat16),
            offs=torch.tensor([4], dtype=torch.int32),
        )
