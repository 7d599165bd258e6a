"""vector-quantize-pytorch steps each rank's codebook by that rank's gradient: https://github.com/lucidrains/vector-quantize-pytorch/issues/222"""

from functools import partial

import torch
from loops import DIM, mlp, trained
from torch import distributed, nn
from vector_quantize_pytorch import VectorQuantize


class Quantized(nn.Module):
    def __init__(self, quantizer):
        super().__init__()
        self.encoder, self.quantizer = mlp(), quantizer

    def forward(self, x):
        found, _, commitment = self.quantizer(self.encoder(x)[None])
        return (found[0] - x).square().mean() + commitment.sum()


class Right(VectorQuantize):
    """The same with a mean over ranks before the codebook's step."""

    def update_in_place_optimizer(self):
        for parameter in self._codebook.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        self.in_place_codebook_optimizer.step()
        self.in_place_codebook_optimizer.zero_grad()


def reference(case, mesh, kind=Right):
    quantizer = kind(
        dim=DIM,
        codebook_size=8,
        learnable_codebook=True,
        ema_update=False,
        in_place_codebook_optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    own = set(quantizer._codebook.parameters())
    bare = Quantized(quantizer)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        bare, [name for name, parameter in bare.named_parameters() if parameter in own]
    )
    return trained(mesh, bare, lambda model, rows: model(rows(8)))


def candidate(case, mesh):
    return reference(case, mesh, VectorQuantize)
