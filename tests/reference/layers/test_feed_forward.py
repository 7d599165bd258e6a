"""SwiGLU against its formula."""

from __future__ import annotations

import torch

from bitproof.reference.layers.feed_forward import FeedForward


def test_the_first_projection_is_the_gate() -> None:
    layer = FeedForward(8, 16)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    gate, up = x @ layer.w1.weight.t(), x @ layer.w3.weight.t()
    expected = (gate * gate.sigmoid() * up) @ layer.w2.weight.t()
    torch.testing.assert_close(layer(x), expected)
