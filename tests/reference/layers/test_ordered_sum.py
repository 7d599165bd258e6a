"""Sums in ascending index order."""

from __future__ import annotations

import torch

from bitproof.reference.layers.ordered_sum import ordered_sum


def test_terms_are_added_in_ascending_index_order() -> None:
    ascending = torch.tensor([[1.0, 1e8, -1e8]])
    assert ordered_sum(ascending, 1).item() == 0.0, "1 is lost in 1e8 before 1e8 leaves"
    assert ordered_sum(ascending.flip(1), 1).item() == 1.0


def test_the_summed_dim_is_gone_and_the_dtype_stays() -> None:
    total = ordered_sum(torch.ones(2, 3, 4, dtype=torch.bfloat16), 1)
    assert total.shape == (2, 4)
    assert total.dtype == torch.bfloat16
