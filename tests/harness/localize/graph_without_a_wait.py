"""A trainer that shows the graph which it runs: `waits`, and `lacks_a_wait`, whose last sum is read too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

functional = torch.ops._c10d_functional
DIM = 512


class Trainer:
    """One step is one graph: loss, gradients, and their sums over ranks."""

    def __init__(self, rank: int, lacks_a_wait: bool) -> None:
        self.model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.GELU(), nn.Linear(DIM, DIM, bias=False))
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in self.model.named_parameters()}
        self.data = torch.Generator().manual_seed(rank)
        self.graph = make_fx(self.compute)(torch.ones(4, DIM), *self.model.parameters())
        if lacks_a_wait:
            last = [node for node in self.graph.graph.nodes if node.target is functional.wait_tensor.default][-1]
            last.replace_all_uses_with(last.args[0])
            self.graph.graph.erase_node(last)
            self.graph.recompile()

    def compute(self, x: Tensor, *parameters: Tensor) -> list[Tensor]:
        """The loss of one rank, and gradients summed over all."""
        names = [name for name, _ in self.model.named_parameters()]
        loss = functional_call(self.model, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
        group = dist.distributed_c10d._get_default_group().group_name
        sums = [functional.all_reduce(each, "sum", group) for each in torch.autograd.grad(loss, parameters)]
        return [loss, *map(functional.wait_tensor, sums)]

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Train once."""
        loss, *gradients = self.graph(torch.randn(4, DIM, generator=self.data), *self.model.parameters())
        yield "loss", "loss", loss
        for (name, parameter), gradient in zip(self.model.named_parameters(), gradients, strict=True):
            yield "grad", name, gradient
            momentum = self.momenta[name]
            with torch.no_grad():
                parameter.sub_(momentum.mul_(0.9).add_(gradient), alpha=0.01)
            yield "param", name, parameter
            yield "optimizer", f"{name}.momentum", momentum


def waits(case: Any, mesh: Any) -> Trainer:
    """Without a defect."""
    return Trainer(mesh.rank, lacks_a_wait=False)


def lacks_a_wait(case: Any, mesh: Any) -> Trainer:
    """The last sum is read before it has arrived."""
    return Trainer(mesh.rank, lacks_a_wait=True)
