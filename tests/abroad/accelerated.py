"""A loop that Accelerate prepared, which wraps model and optimizer and accumulates gradients."""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

import bitproof


def plain(case, mesh, lr=1e-3, **ddp):
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(**ddp)]
    )
    bare = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=lr))
    data = torch.Generator().manual_seed(mesh.rank)

    def train():
        while True:
            x = torch.randn(4, 16, generator=data)
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    return bitproof.watch(train=train, model=bare)


def views(case, mesh):
    return plain(case, mesh, gradient_as_bucket_view=True)


def other_lr(case, mesh):
    return plain(case, mesh, lr=2e-3)
