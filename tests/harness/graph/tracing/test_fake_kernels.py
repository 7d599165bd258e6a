"""A fake grouped product has the real one's shape, dtype and strides, in float32 as in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm

from bitproof.harness.graph.tracing import fake_kernels


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


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float32, torch.bfloat16)])
def test_other_dtypes_are_left_to_torch(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = (torch.ones(shape, dtype=dtype) for shape, dtype in zip([(4, 16), (1, 16, 8)], dtypes, strict=True))
    assert fake_kernels.grouped_mm(FakeTensorMode(), torch.ops.aten._grouped_mm.default, a, b) is NotImplemented
