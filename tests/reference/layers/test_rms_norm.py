"""RMSNorm computes in float32 and returns what it was given."""

from __future__ import annotations

import torch

from bitproof.reference.layers.rms_norm import RMSNorm


def test_a_row_comes_out_with_a_root_mean_square_of_one() -> None:
    y = RMSNorm(64)(5 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(3), rtol=1e-5, atol=0)


def test_float32_is_used_inside_and_the_input_dtype_comes_back() -> None:
    norm = RMSNorm(64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = norm(x.float())
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), exact.bfloat16()), "one rounding, at the end"


def test_eps_keeps_a_row_of_zeros_at_zero() -> None:
    assert torch.equal(RMSNorm(8)(torch.zeros(1, 8)), torch.zeros(1, 8))
