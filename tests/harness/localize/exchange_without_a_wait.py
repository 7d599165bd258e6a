"""Trainers whose last exchange nobody waits for, by works of c10d or by functional collectives: `works`, `functions`.

Rank 1 launches late, so that rank 0 reads what has not arrived. `works__waits` and `functions__waits` have no defect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

functional = torch.ops._c10d_functional


class Trainer:
    """Sums gradients over ranks one after the other."""

    def __init__(self, case: Any, mesh: Any, way: str, waits: bool) -> None:
        self.rank, self.way, self.waits = mesh.rank, way, waits
        self.model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = torch.Generator().manual_seed(mesh.rank)

    def exchange(self, gradient: Tensor, waits: bool) -> Tensor:
        """The sum over ranks, if anybody waits for it."""
        if not waits and self.rank == 1:
            time.sleep(0.3)
        if self.way == "works":
            work = dist.all_reduce(gradient, async_op=True)
            if waits:
                work.wait()
            return gradient
        summed = functional.all_reduce(gradient, "sum", dist.distributed_c10d._get_default_group().group_name)
        return functional.wait_tensor(summed) if waits else summed

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Train once."""
        loss = self.model(torch.randn(4, 4, generator=self.data)).square().mean()
        loss.backward()
        yield "loss", "loss", loss
        named = dict(self.model.named_parameters())
        for name, parameter in named.items():
            assert parameter.grad is not None
            parameter.grad = self.exchange(parameter.grad, self.waits or name != "2.weight") / 2
            yield "grad", name, parameter.grad
        self.optimizer.step()
        for name, parameter in named.items():
            yield "param", name, parameter
            yield "optimizer", name, self.optimizer.state[parameter]["momentum_buffer"]
        self.optimizer.zero_grad()


def __getattr__(name: str) -> Any:
    """A trainer by its name."""
    way, _, reported = name.partition("__")
    if way not in ("works", "functions") or reported not in ("", "waits"):
        raise AttributeError(name)
    return partial(Trainer, way=way, waits=reported == "waits")
