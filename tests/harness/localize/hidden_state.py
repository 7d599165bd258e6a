"""Trainers with state that they do not show: counts in a buffer, generators. `drawn` and `left` have a defect each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Trainer:
    """Reads its counts from the third step on."""

    def __init__(self, rank: int, draws_more: bool = False, counts_more: bool = False) -> None:
        self.rank, self.draws_more, self.counts_more = rank, draws_more, counts_more
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.model[0].register_buffer("counts", torch.zeros(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Train once."""
        counts: Any = self.model[0].counts
        x = torch.rand(8, 4) + (counts if index >= 2 else 0)
        if self.draws_more and self.rank == 1 and index == 1:
            torch.rand(1)
        if self.counts_more and self.rank == 1 and index == 0:
            counts.add_(1)
        loss = self.model(x).square().mean()
        loss.backward()
        counts.add_(x.detach().sum(0))
        yield "loss", "loss", loss
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            yield "grad", name, parameter.grad
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, parameter
            for state, value in self.optimizer.state[parameter].items():
                yield "optimizer", f"{name}.{state}", value
        self.optimizer.zero_grad()


def right(case: Any, mesh: Any) -> Trainer:
    """Without a defect."""
    return Trainer(mesh.rank)


def drawn(case: Any, mesh: Any) -> Trainer:
    """Rank 1 draws a number too many in the second step, after its data."""
    return Trainer(mesh.rank, draws_more=True)


def left(case: Any, mesh: Any) -> Trainer:
    """Rank 1 counts one too many in the first step, which is read in the third."""
    return Trainer(mesh.rank, counts_more=True)
