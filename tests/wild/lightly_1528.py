"""lightly's gather has the gradient of this rank's loss alone: https://github.com/lightly-ai/lightly/issues/1528"""

import os

os.environ["LIGHTLY_DID_VERSION_CHECK"] = "True"  # else a process asks its makers

import torch
from lightly.loss.ntx_ent_loss import NTXentLoss
from lightly.utils import dist
from loops import mlp, trained


class Gathered(torch.autograd.Function):
    """Every rank's rows; the gradient is the sum over ranks of what each of their losses asks for."""

    @staticmethod
    def forward(ctx, rows):
        whole = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(whole, rows)
        return tuple(whole)

    @staticmethod
    def backward(ctx, *grads):
        summed = torch.stack(grads)
        torch.distributed.all_reduce(summed)
        return summed[torch.distributed.get_rank()]


def candidate(case, mesh):
    loss = NTXentLoss(gather_distributed=True)

    def two_views(model, rows):
        x = rows(8)
        return loss(*model(torch.cat([x, x + 0.1 * rows(8)])).chunk(2))

    return trained(mesh, mlp(), two_views)


def reference(case, mesh):
    dist.gather = Gathered.apply
    return candidate(case, mesh)
