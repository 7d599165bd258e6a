"""The loss is taken in float32."""

from __future__ import annotations

import math

import torch

from bitproof.reference.loss import cross_entropy


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    loss = cross_entropy(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64))
    assert loss.shape == ()
    assert abs(loss.item() - math.log(8)) < 1e-6


def test_bfloat16_logits_are_widened_before_anything_else() -> None:
    logits_BSV = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels_BS = torch.tensor([[0, 1, 2], [3, 4, 5]])
    loss = cross_entropy(logits_BSV, labels_BS)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy(logits_BSV.float(), labels_BS))


def test_each_label_is_matched_with_its_own_logits() -> None:
    logits_BSV = torch.full((2, 2, 4), -50.0)
    labels_BS = torch.tensor([[0, 1], [2, 3]])
    logits_BSV.scatter_(2, labels_BS.unsqueeze(2), 50.0)
    assert cross_entropy(logits_BSV, labels_BS).item() < 1e-6
    assert cross_entropy(logits_BSV, labels_BS.t()).item() > 1.0
