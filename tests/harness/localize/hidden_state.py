"""Trainers with state that they do not show: counts in a buffer, generators, an expert bias.

`drawn`, `left`, `biased`, `counts_its_own`, `leaves_out` and `leaves_out_on_rank_1` have a defect each.
"""

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


class Router(nn.Module):
    """Sends each token to the expert of the highest score, bias and all; what went where steers the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("expert_bias", torch.zeros(3))
        self.register_buffer("tokens_per_expert", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Every token by its one expert."""
        scores, counts, bias = self.gate(x).sigmoid(), self.tokens_per_expert, self.expert_bias
        assert isinstance(counts, Tensor) and isinstance(bias, Tensor)
        chosen = (scores + bias).argmax(-1)
        counts.add_(torch.bincount(chosen, minlength=3))
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        index = chosen[:, None]
        return (outputs * scores[..., None]).gather(1, index[..., None].expand(-1, 1, 4)).squeeze(1)


class Balanced(Trainer):
    """A trainer with a router whose bias changes after each step, and is read in the next."""

    def __init__(self, rank: int, speed: float = 0.05, sums: bool = True) -> None:
        super().__init__(rank)
        self.speed, self.sums = speed, sums
        self.model = nn.Sequential(nn.Linear(4, 4), Router(), nn.Linear(4, 2))
        self.model[0].register_buffer("counts", torch.zeros(4), persistent=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Train once, then balance."""
        yield from super().step(index)
        router: Any = self.model[1]
        if self.sums:
            dist.all_reduce(router.tokens_per_expert)
        counts = router.tokens_per_expert
        router.expert_bias.add_((counts.mean() - counts) * self.speed)
        counts.zero_()


def balanced(case: Any, mesh: Any) -> Balanced:
    """Without a defect."""
    return Balanced(mesh.rank)


def biased(case: Any, mesh: Any) -> Balanced:
    """The bias changes faster than it should, on all ranks."""
    return Balanced(mesh.rank, speed=0.2)


def counts_its_own(case: Any, mesh: Any) -> Balanced:
    """Each rank steers its bias by its own tokens alone."""
    return Balanced(mesh.rank, sums=False)


def listed(case: Any, mesh: Any, ranks: tuple[int, ...] = ()) -> Trainer:
    """Updates lists of parameters; on `ranks` without one, of which it then has no state to show."""
    trainer = Trainer(mesh.rank)
    parameters = [x for name, x in trainer.model.named_parameters() if mesh.rank not in ranks or name != "2.weight"]
    trainer.optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=True)
    return trainer


def leaves_out(case: Any, mesh: Any) -> Trainer:
    """Leaves it out on all ranks."""
    return listed(case, mesh, (0, 1))


def leaves_out_on_rank_1(case: Any, mesh: Any) -> Trainer:
    """Leaves it out on rank 1 alone."""
    return listed(case, mesh, (1,))
