"""Grouped experts against one expert at a time, and the exchange that rows pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitproof.reference.layers.experts import Experts, LocalExchange


def one_expert(experts: Experts, expert: int, rows_RD: Tensor) -> Tensor:
    gate = functional.silu(rows_RD @ experts.w1[expert].t())
    return (gate * (rows_RD @ experts.w3[expert].t())) @ experts.w2[expert].t()


@pytest.mark.parametrize("counts", [[2, 3, 1, 4], [0, 10, 0, 0], [5, 0, 0, 5]])
def test_each_row_passes_its_own_expert(counts: list[int]) -> None:
    experts = Experts(4, 16, 32)
    rows_RD = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([one_expert(experts, e, rows) for e, rows in enumerate(rows_RD.split(counts))])
    torch.testing.assert_close(experts(rows_RD, torch.tensor(counts)), expected)


def test_no_rows_at_all_are_fine() -> None:
    assert Experts(4, 16, 32)(torch.empty(0, 16), torch.zeros(4, dtype=torch.int64)).shape == (0, 16)


def test_the_local_exchange_moves_nothing_and_says_where_experts_end() -> None:
    rows_RD = torch.ones(6, 8)
    rows_rD, ends_e, state = LocalExchange().dispatch(rows_RD, torch.tensor([2, 0, 4]))
    assert rows_rD is rows_RD
    assert ends_e.dtype == torch.int32
    assert ends_e.tolist() == [2, 2, 6]
    assert LocalExchange().combine(rows_rD, state) is rows_RD


class HalfTheExperts:
    """Keeps the rows of experts 0 and 1, and gives zeros back for the others."""

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        kept = int(counts_E[:2].sum())
        return rows_RD[:kept], counts_E[:2].cumsum(0).to(torch.int32), rows_RD.shape

    def combine(self, rows_rD: Tensor, state: Any) -> Tensor:
        return torch.cat((rows_rD, rows_rD.new_zeros(state[0] - rows_rD.shape[0], state[1])))


def test_experts_work_on_a_range_of_their_weights_behind_an_exchange() -> None:
    whole, part = Experts(4, 16, 32), Experts(4, 16, 32)
    for name, weight in whole.named_parameters():
        setattr(part, name, nn.Parameter(weight[:2].detach().clone()))
    part.exchange = HalfTheExperts()
    rows_RD, counts_E = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 3, 1, 4])
    y_RD = part(rows_RD, counts_E)
    assert torch.equal(y_RD[:5], whole(rows_RD, counts_E)[:5])
    assert torch.equal(y_RD[5:], torch.zeros(5, 16))
