"""torch-optimizer's SGDW takes the decay from every parameter alike: https://github.com/jettify/pytorch-optimizer/issues/454"""

import torch
import torch_optimizer
from loops import mlp, squared_error, trained

DECAY = 0.01


class Mended(torch_optimizer.SGDW):
    """Without a release that mends it: the decay is a part of the parameter, as in the paper."""

    @torch.no_grad()
    def step(self, closure=None):
        [group] = self.param_groups
        group["weight_decay"] = 0
        super().step(closure)
        group["weight_decay"] = DECAY
        for parameter in group["params"]:
            parameter.add_(parameter, alpha=-group["lr"] * DECAY)


def reference(case, mesh, kind=Mended):
    return trained(mesh, mlp(), squared_error, kind, lr=0.1, settings={"momentum": 0.9, "weight_decay": DECAY})


def candidate(case, mesh):
    return reference(case, mesh, Mended if case.options.get("mended") else torch_optimizer.SGDW)
