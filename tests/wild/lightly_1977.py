"""lightly's Barlow Twins sums over ranks outside of autograd: https://github.com/lightly-ai/lightly/issues/1977"""

import os

os.environ["LIGHTLY_DID_VERSION_CHECK"] = "True"  # else a process asks its makers

import torch
from lightly.loss import barlow_twins_loss as lightly
from loops import mlp, trained
from torch import distributed
from torch.distributed import nn as differentiable


class Right(lightly.BarlowTwinsLoss):
    """The same with a sum that has a gradient."""

    def forward(self, z_a, z_b):
        c = lightly._normalize(z_a).T @ lightly._normalize(z_b)
        c.div_(z_a.size(0))
        c = differentiable.all_reduce(c / distributed.get_world_size())
        alike = torch.diagonal(c).add_(-1).pow_(2).sum()
        return alike + self.lambda_param * lightly._off_diagonal(c).pow_(2).sum()


def reference(case, mesh, kind=Right):
    loss = kind(gather_distributed=True)

    def two_views(model, rows):
        x = rows(8)
        return loss(*model(torch.cat([x, x + 0.1 * rows(8)])).chunk(2))

    return trained(mesh, mlp(), two_views)


def candidate(case, mesh):
    return reference(case, mesh, lightly.BarlowTwinsLoss)
