"""lightly's SIGReg sums over ranks outside of autograd: https://github.com/lightly-ai/lightly/issues/1920"""

import os

os.environ["LIGHTLY_DID_VERSION_CHECK"] = "True"  # else a process asks its makers

from lightly.loss import lejepa_loss
from loops import mlp, trained
from torch.distributed import get_world_size
from torch.distributed import nn as differentiable


class Right(lejepa_loss.SIGReg):
    """The same with sums that have a gradient."""

    def _compute_cf_error_at_each_frequency(self, x_t, num_samples):
        cos_mean, sin_mean = (differentiable.all_reduce(wave.sum(-3)) / num_samples for wave in (x_t.cos(), x_t.sin()))
        return (cos_mean - self.phi.to(dtype=x_t.dtype)).square() + sin_mean.square()


def reference(case, mesh, kind=Right):
    assert get_world_size() > 1
    loss = kind(num_vectors=32, gather_distributed=True)
    return trained(mesh, mlp(), lambda model, rows: loss(model(rows(8))))


def candidate(case, mesh):
    return reference(case, mesh, lejepa_loss.SIGReg)
