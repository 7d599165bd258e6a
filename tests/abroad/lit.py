"""Lightning's Trainer, which owns its loop and hands the optimizer a closure."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import bitproof


class Model(lightning.LightningModule):
    def __init__(self, activation=nn.GELU):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), activation(), nn.Linear(64, 16))

    def training_step(self, x, index):
        return (self.layers(x) - x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=self.foreach)


def plain(case, mesh, foreach=False, **settings):
    model, data = Model(), DataLoader(torch.randn(64, 16), batch_size=4)
    model.foreach = foreach
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    own = lightning.Trainer(
        accelerator="cpu",
        devices=case.parallelism.world_size,
        strategy="ddp",
        gradient_clip_val=1.0,
        **quiet,
        **settings,
    )
    return bitproof.watch(train=lambda: own.fit(model, data), model=model)


def foreach(case, mesh):
    return plain(case, mesh, foreach=True)


def accumulating(case, mesh):
    return plain(case, mesh, accumulate_grad_batches=2)
