"""Lightning whose module steps by hand over a static graph: https://github.com/Lightning-AI/pytorch-lightning/issues/18086"""

import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import bitproof

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.layers(batch) - batch).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(mesh, static_graph):
    module = Module()
    own = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(static_graph=static_graph),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = DataLoader(torch.randn(64, 16), batch_size=4)
    return bitproof.watch(train=lambda: own.fit(module, rows), model=module)


def reference(case, mesh):
    return trained(mesh, static_graph=False)


def candidate(case, mesh):
    return trained(mesh, static_graph=True)
