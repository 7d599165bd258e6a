"""diffusers' ring attention over more than two ranks, in every release so far.

Keys and values travel one way, and their gradients the other.
"""

import torch
from diffusers.models import attention_dispatch
from ring import TemplatedRingAttention, attending, reference

__all__ = ["candidate", "reference"]


class Backwards(list):
    """The ranks' keys and values, from which the backward takes those of one rank before, and not of one after."""

    def __getitem__(self, asked):
        rank = torch.distributed.get_rank()
        return super().__getitem__((2 * rank - asked) % len(self))


class Mended(TemplatedRingAttention):
    """No release mends it: the same backward, with keys and values in the order in which gradients travel."""

    @staticmethod
    def backward(ctx, *grads):
        chunk = torch.Tensor.chunk
        torch.Tensor.chunk = lambda tensor, count, dim=0: Backwards(chunk(tensor, count, dim))
        try:
            return TemplatedRingAttention.backward(ctx, *grads)
        finally:
            torch.Tensor.chunk = chunk


def candidate(case, mesh):
    assert attention_dispatch.TemplatedRingAttention is TemplatedRingAttention
    return attending(case, mesh, Mended if case.options.get("mended") else TemplatedRingAttention)
