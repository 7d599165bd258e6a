"""The training loop that most of these bugs need."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bitproof

DIM = 16


def mlp():
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def trained(mesh, bare, loss_of, optimizer=torch.optim.AdamW, lr=1e-2, settings=None, **ddp):
    """A system whose step is `loss_of(model, rows)`, where `rows(n)` draws this rank's next rows."""
    model = DistributedDataParallel(bare, **ddp)
    own = optimizer(model.parameters(), lr=lr, **settings or {})
    data = torch.Generator().manual_seed(mesh.rank)

    def step(index):
        loss = loss_of(model, lambda count: torch.randn(count, DIM, generator=data))
        loss.backward()
        own.step()
        own.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=own)


def squared_error(model, rows):
    x = rows(4)
    return (model(x) - x).square().mean()
