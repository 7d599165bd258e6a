"""Trainers whose ranks meet in steps in one way each, or never; and some whose model is to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn


class Loner:
    """A trainer that runs no collective. Others say what they do `before` all steps and in each."""

    def __init__(self, case: Any, mesh: Any) -> None:
        self.rank = mesh.rank
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.run: Callable[..., Any] = self.model
        self.before()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def before(self) -> None: ...

    def meet(self, x: torch.Tensor) -> None: ...

    def step(self, index: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * index + self.rank))
        loss = self.run(x).square().mean()
        loss.backward()
        self.meet(torch.ones(2))
        yield "loss", "loss", loss.detach()
        yield from (("grad", name, p.grad) for name, p in self.model.named_parameters())
        self.optimizer.step()
        for name, p in self.model.named_parameters():
            yield "param", name, p.detach()
            yield "optimizer", f"{name}.momentum", self.optimizer.state[p]["momentum_buffer"]
        self.optimizer.zero_grad()


class alone(Loner):  # noqa: N801 (systems have the names of factories)
    pass


class independent(Loner):  # noqa: N801
    independent_ranks = True


class met_before(Loner):  # noqa: N801
    def before(self) -> None:
        dist.all_reduce(torch.ones(1))


class group_of_one(Loner):  # noqa: N801
    def before(self) -> None:
        self.group = [dist.new_group([rank]) for rank in range(2)][self.rank]

    def meet(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.group)


class reduced(Loner):  # noqa: N801
    def meet(self, x: torch.Tensor) -> None:
        dist.all_reduce(x)


class by_function(Loner):  # noqa: N801
    def meet(self, x: torch.Tensor) -> None:
        assert functional.all_reduce(x, "sum", dist.group.WORLD).sum() == 4


class sent(Loner):  # noqa: N801
    def meet(self, x: torch.Tensor) -> None:
        _ = dist.send(x, 1) if self.rank == 0 else dist.recv(x, 0)


class own_group(Loner):  # noqa: N801
    def meet(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=dist.new_group([0, 1]))


class data_parallel(Loner):  # noqa: N801
    def before(self) -> None:
        self.run = nn.parallel.DistributedDataParallel(self.model)


class two_of_three(Loner):  # noqa: N801
    """Rank 1 runs its collectives among itself."""

    def before(self) -> None:
        self.group = [dist.new_group([rank]) for rank in range(2)][self.rank]

    def meet(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.group)
        if self.rank == 0:
            dist.isend(x, 1)  # nobody takes it


class compiled(reduced):  # noqa: N801
    def before(self) -> None:
        self.run = torch.compile(self.model, backend="eager")


class stance(compiled):  # noqa: N801
    def before(self) -> None:
        super().before()
        torch.compiler.set_stance("force_eager")


class broken(reduced):  # noqa: N801
    """Its graph ends in the middle."""

    def before(self) -> None:
        @torch.compile(backend="eager")
        def run(x: torch.Tensor) -> Any:
            x = self.model(x)
            torch._dynamo.graph_break()
            return x * 2

        self.run = run


class fallen_back(reduced):  # noqa: N801
    """Its backend fails, and torch.compile runs the code as it is."""

    def before(self) -> None:
        def fail(module: Any, inputs: Any) -> Any:
            raise RuntimeError("no compiler here")

        torch._dynamo.config.suppress_errors = True
        self.run = torch.compile(self.model, backend=fail)


class infinite(reduced):  # noqa: N801
    """All that it shows has left the range of numbers."""

    def step(self, index: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        for kind, name, value in super().step(index):
            yield kind, name, torch.full_like(value, float("inf"))


SYSTEMS = (
    *("alone", "independent", "met_before", "group_of_one", "reduced", "by_function", "sent", "own_group"),
    *("data_parallel", "two_of_three", "compiled", "stance"),
)
