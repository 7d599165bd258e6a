"""vector-quantize-pytorch's mean over ranks in lookup-free quantization: https://github.com/lucidrains/vector-quantize-pytorch/issues/158

The report is of a sum outside of autograd, in 1.16.1. The releases since then throw away what the sum returns: see
`vq_discarded`.
"""

from loops import DIM, mlp, trained
from torch import nn
from torch.distributed import get_world_size
from torch.distributed import nn as differentiable
from vector_quantize_pytorch import lookup_free_quantization as lfq


def right(probabilities):
    return differentiable.all_reduce(probabilities) / get_world_size()


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer = mlp(), lfq.LFQ(dim=DIM, codebook_size=16, entropy_loss_weight=1.0)

    def forward(self, x):
        found, _, entropy = self.quantizer(self.encoder(x)[None], inv_temperature=1.0)
        return (found[0] - x).square().mean() + entropy


def candidate(case, mesh):
    if case.options.get("mended"):
        lfq.maybe_distributed_mean = right
    return trained(mesh, Quantized(), lambda model, rows: model(rows(8)))


def reference(case, mesh):
    lfq.maybe_distributed_mean = right
    return candidate(case, mesh)
