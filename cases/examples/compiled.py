"""A model compiled by torch.compile, compared with the same model in eager mode.

    bitproof run -k compiled

    eager        every operator by itself
    aot_eager    captured and differentiated by torch.compile, then run operator by operator: the same bits
    inductor     compiled: fuses operators and sums in another order, so bits differ by some ULPs

Each rank trains a copy on its own data; gradients are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitproof import Case, MachineError, Mesh, compiler_problem

DIM = 48


class Replica:
    """A rank's copy of the model, and its optimizer.

    `backend` is the backend of torch.compile; None runs the model in eager.
    """

    def __init__(self, case: Case, mesh: Mesh, backend: str | None) -> None:
        self.mesh = mesh
        self.batch = case.batch
        self.model = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Softmax(dim=-1)
        ).to(mesh.device)
        self.compute_loss = torch.compile(self._loss, backend=backend) if backend else self._loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=case.optimizer.lr, momentum=0.9)
        # Each rank has data of its own; the model is equal on all ranks, as bitproof seeds torch alike on each.
        self.data = torch.Generator().manual_seed(1000 * case.seed + mesh.rank)

    def _loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x).square().mean()

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take a training step, and yield (kind, name, tensor) for each value as soon as it is computed."""
        x = torch.randn(self.batch.sequences, self.batch.seq_len, DIM, generator=self.data).to(self.mesh.device)
        loss = self.compute_loss(x)
        loss.backward()
        yield "loss", "loss", loss
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            yield "grad", name, parameter.grad
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, parameter
            yield "optimizer", f"{name}.momentum", self.optimizer.state[parameter]["momentum_buffer"]
        self.optimizer.zero_grad()


def eager(case: Case, mesh: Mesh) -> Replica:
    return Replica(case, mesh, None)


def aot_eager(case: Case, mesh: Mesh) -> Replica:
    return Replica(case, mesh, "aot_eager")


def inductor(case: Case, mesh: Mesh) -> Replica:
    # On a CPU, Inductor needs a C++ compiler.
    if mesh.device.type == "cpu" and (problem := compiler_problem()):
        raise MachineError("Inductor cannot compile for this CPU without a C++ compiler", found=problem)
    return Replica(case, mesh, "inductor")
