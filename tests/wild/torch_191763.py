"""Fused SGD on a CPU leaves parameters in bfloat16 as they are: https://github.com/pytorch/pytorch/issues/191763"""

import torch
from loops import mlp, trained


def in_bfloat16(model, rows):
    x = rows(4).to(torch.bfloat16)
    return (model(x) - x).float().square().mean()


def reference(case, mesh, fused=False):
    bare = mlp().to(torch.bfloat16)
    return trained(mesh, bare, in_bfloat16, torch.optim.SGD, lr=0.5, settings={"fused": fused})


def candidate(case, mesh):
    return reference(case, mesh, fused=True)
