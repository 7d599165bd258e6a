"""Trainers under DistributedDataParallel whose models register other buffers than the reference's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bitproof
from bitproof import Case, Mesh

LENGTH, DIM = 6, 8


class Model(nn.Module):
    """Adds a vector for each position. `scale` is a constant that both sides register."""

    def __init__(self, positions: Tensor | None = None, *, counts: bool = False, is_persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        if positions is not None:
            self.register_buffer("positions", positions, persistent=is_persistent)
        if counts:
            self.register_buffer("count", torch.zeros(()))
        self.pos = nn.Embedding(LENGTH, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """x_BLD to y_BLD."""
        own = getattr(self, "positions", None)
        at = torch.arange(x.shape[1]) if own is None else own[: x.shape[1]]
        if hasattr(self, "count"):
            self.count += 1
        y: Tensor = self.out(x * self.scale + self.pos(at))
        return y


def trained(mesh: Mesh, model: nn.Module, rate: float = 1e-2) -> Any:
    """A watched step."""
    wrapped = DistributedDataParallel(model)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=rate), torch.Generator().manual_seed(mesh.rank)

    def step(index: int) -> Tensor:
        loss: Tensor = wrapped(torch.randn(2, LENGTH - 1, DIM, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=wrapped, optimizer=optimizer)


def plain(case: Case, mesh: Mesh) -> Any:
    """Makes its positions in each forward."""
    return trained(mesh, Model())


def constant(case: Case, mesh: Mesh) -> Any:
    """Has the same positions in a buffer."""
    return trained(mesh, Model(torch.arange(LENGTH)))


def persistent(case: Case, mesh: Mesh) -> Any:
    """The same, which is saved."""
    return trained(mesh, Model(torch.arange(LENGTH), is_persistent=True))


def shifted(case: Case, mesh: Mesh) -> Any:
    """Has other positions."""
    return trained(mesh, Model(torch.arange(1, LENGTH + 1) % LENGTH))


def unwritten(case: Case, mesh: Mesh) -> Any:
    """Was built without memory, and gets all but its buffer from a state dict."""
    state = {name: value for name, value in Model().state_dict().items() if name != "scale"}
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu").load_state_dict(state, strict=False)
    return trained(mesh, model)


def counting(case: Case, mesh: Mesh) -> Any:
    """Counts its forwards."""
    return trained(mesh, Model(counts=True))


def counting_faster(case: Case, mesh: Mesh) -> Any:
    """Counts its forwards, and learns at another rate."""
    return trained(mesh, Model(counts=True), rate=2e-2)
