"""diffusers' ring attention on CPU ranks: the ring is the release's, and the two operators are torch's own for CPUs.

`Right` is the same ring, whose gradients are made of every rank's part: each rank computes its part of the gradient of
each rank's keys and values, and the parts are added in the order in which a ring would carry them.
"""

from functools import partial
from types import SimpleNamespace as Made

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAttention
from loops import DIM, trained
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

aten = torch.ops.aten
HEADS = 2


def flipped(*tensors):
    """From (batch, sequence, heads, ...) to (batch, heads, sequence, ...), or back."""
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)


def forward_op(ctx, query, key, value, *rest, _save_ctx=True, **_):
    out, lse = flipped(*aten._scaled_dot_product_flash_attention_for_cpu(*flipped(query, key, value)))
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
    return out, lse


def backward_op(ctx, grad_out, *_, **given):
    """Reads what is not given from the first turn, as every operator of diffusers does."""
    saved = dict(zip(("query", "key", "value", "out", "lse"), ctx.saved_tensors, strict=True)) | given
    tensors = flipped(grad_out, *(saved[name] for name in ("query", "key", "value", "out", "lse")))
    return flipped(*aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, False))


class Right(TemplatedRingAttention):
    @staticmethod
    def forward(ctx, *args):
        out, lse = TemplatedRingAttention.forward(ctx, *args[:8], True, *args[9:])
        ctx.whole = out.detach(), lse.detach()
        return out

    @staticmethod
    def backward(ctx, grad_out, *_):
        query, key, value, *_ = ctx.saved_tensors
        ranks, rank = distributed.get_world_size(), distributed.get_rank()
        whole = [torch.empty_like(torch.stack([key, value])) for _ in range(ranks)]
        distributed.all_gather(whole, torch.stack([key, value]))
        parts, grad_query = [None] * ranks, torch.zeros_like(query)
        for turn in range(ranks):
            owner = (rank - turn) % ranks
            out, lse = ctx.whole
            of_query, *of_pair = backward_op(
                ctx, grad_out, query=query, key=whole[owner][0], value=whole[owner][1], out=out, lse=lse
            )
            parts[owner], grad_query = torch.stack(of_pair), grad_query + of_query
        everyone = [torch.empty_like(torch.stack(parts)) for _ in range(ranks)]
        distributed.all_gather(everyone, torch.stack(parts))
        of_own = torch.zeros_like(parts[0])
        for turn in range(ranks):
            of_own = of_own + everyone[(rank + turn) % ranks][rank]
        return grad_query, of_own[0], of_own[1], *[None] * 9


class Attention(nn.Module):
    def __init__(self, ring, config):
        super().__init__()
        self.project, self.output = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        options = None, 0.0, False, None, False, False, forward_op, backward_op
        self.attend = lambda q, k, v: ring.apply(q, k, v, *options, Made(context_parallel_config=config))

    def forward(self, x):
        parts = self.project(x).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(-3)
        return self.output(self.attend(*parts).flatten(-2))


def attending(case, mesh, ring):
    ranks = case.parallelism.world_size
    config = ContextParallelConfig(ring_degree=ranks)
    ring_of_all = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ring", "ulysses"))
    config.setup(mesh.rank, ranks, torch.device("cpu"), ring_of_all)

    def loss_of(model, rows):
        x = rows(8)[None]
        return (model(x) - x).square().mean()

    return trained(mesh, Attention(ring, config), loss_of)


reference, candidate = partial(attending, ring=Right), partial(attending, ring=TemplatedRingAttention)
