"""Sequence parallelism: outside split layers, each rank of a tensor group has only a part of the sequence.

A rank has adjacent tokens of every row, and computes residuals and norms only for them
(https://arxiv.org/abs/2205.05198, section 4.2). Attention and feed-forward are split as in `tensor`, but their sums
become

    input      forward: all-gather       backward: reduce-scatter, the sum of the ranks' gradients
    output     forward: reduce-scatter   backward: all-gather

Every rank computes the embeddings and the projection to logits for all tokens. After the embeddings, a rank keeps its
own tokens; before the projection, all tokens are gathered. Gradients are not summed there, since every rank already has
them for all tokens.
"""

# W ranks of the tensor group, B batch, S sequence, s a rank's part of it (S / W), D model dim

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitproof.reference.parallel.collectives import all_gather, reduce_scatter


def gathered(x_BsD: Tensor, size: int, group: str) -> Tensor:
    """Gather all ranks' parts of the sequence, in rank order. Returns (B, S, D)."""
    x_WBsD = all_gather(x_BsD.contiguous(), size, group).unflatten(0, (size, -1))
    return x_WBsD.transpose(0, 1).flatten(1, 2)


def scattered(x_BSD: Tensor, size: int, group: str) -> Tensor:
    """Sum all ranks' `x_BSD`, in rank order on gloo, and return this rank's part of the sequence: (B, s, D)."""
    x_WBsD = x_BSD.unflatten(1, (size, -1)).transpose(0, 1)
    return reduce_scatter(x_WBsD.flatten(0, 1).contiguous(), size, group)


def own_part(x_BSD: Tensor, size: int, coordinate: Tensor) -> Tensor:
    """Return the part of the sequence that belongs to the rank at `coordinate`, an index tensor (1,).

    The result is (B, s, D).
    """
    return x_BSD.unflatten(1, (size, -1)).index_select(1, coordinate).flatten(1, 2)


class GatherInput(torch.autograd.Function):
    """Gathers the parts of the sequence at the input of a split layer.

    Its backward sums the gradients and keeps a part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return gathered(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scattered(grad, ctx.size, ctx.group), None, None


class ScatterOutput(torch.autograd.Function):
    """Sums the output of a split layer and keeps this rank's part of the sequence.

    Its backward gathers the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return scattered(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.size, ctx.group), None, None


class KeepOwn(torch.autograd.Function):
    """Keeps only this rank's part of the sequence, of a tensor that every rank has whole.

    Its backward gathers the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, coordinate: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return own_part(x, size, coordinate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gathered(grad, ctx.size, ctx.group), None, None, None


class GatherWhole(torch.autograd.Function):
    """Gathers the parts of the sequence for a layer that every rank computes whole.

    Its backward keeps this rank's part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, coordinate: Tensor, size: int, group: str) -> Tensor:
        ctx.size = size
        ctx.save_for_backward(coordinate)
        return gathered(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (coordinate,) = ctx.saved_tensors
        # Without a sum: each rank already has the whole gradient.
        return own_part(grad, ctx.size, coordinate), None, None, None
