"""Tensor parallelism: the ranks of a tensor group share one attention or feed-forward layer between them.

Weights that map into heads or hidden features are split by output (dim 0), weights that map out of them
by input (dim 1), so a rank computes whole heads and features, and a partial sum of the layer's output.
Two sums a layer bring the ranks together (https://arxiv.org/abs/1909.08053, section 3):

    forward     the layer's output, over its ranks' partial sums
    backward    the gradient of the layer's input, of which each rank has the part of its own features

Both are sums in the tensor's dtype and, on gloo, in rank order, so all ranks of a tensor group hold equal bits
outside split layers. All else is replicated: norms, embeddings and the output layer read the same input
and get the same gradient on each of them, so their gradients agree without being summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import CaseError
from reference.layers.feed_forward import FeedForward
from reference.layers.grouped_query_attention import GroupedQueryAttention
from reference.layers.rms_norm import RMSNorm
from reference.parallel.collectives import all_reduce
from reference.parallel.mesh import TENSOR, Mesh

SPLIT_DIMS: dict[type[nn.Module], dict[str, int]] = {
    GroupedQueryAttention: {"wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "wo.weight": 1},
    FeedForward: {"w1.weight": 0, "w3.weight": 0, "w2.weight": 1},
}
"""The layers that can be split: the dim along which each of their parameters is."""


class SumGradient(torch.autograd.Function):
    """The identity, where a split layer begins; its gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """`x` as it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum of all ranks' `grad`."""
        return all_reduce(grad.contiguous(), ctx.group), None


class SumOutput(torch.autograd.Function):
    """The sum over the group, where a split layer ends; its gradient is every rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """The sum of all ranks' `x`."""
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """`grad` as it is."""
        return grad, None


def split_layers(model: nn.Module, mesh: Mesh) -> dict[str, int]:
    """Make every attention and feed-forward layer of a decoder compute this rank's part and sum, in place.

    Returns the dim along which `fully_shard` must split each of their parameters, by name; empty without tensor
    parallelism. Raises CaseError for a layer that cannot be split, or not evenly.
    """
    size = mesh.size(TENSOR)
    if size == 1:
        return {}
    dims: dict[str, int] = {}
    for layer, block in model.get_submodule("layers").named_children():
        for name, module in block.named_children():
            if not isinstance(module, RMSNorm):
                _refuse_unless_split_evenly(f"layers.{layer}.{name}", module, size)
                dims |= {f"layers.{layer}.{name}.{own}": dim for own, dim in SPLIT_DIMS[type(module)].items()}
                module.__class__ = _splitting_class(type(module))
    return dims


def _refuse_unless_split_evenly(name: str, module: nn.Module, size: int) -> None:
    known = SPLIT_DIMS.get(type(module), {})
    if unknown := [own for own, _ in module.named_parameters() if own not in known]:
        raise CaseError(
            f"{name} cannot be split over tensor-parallel ranks",
            expected="grouped-query attention without query and key norms, or a dense feed-forward layer",
            found=f"{type(module).__name__} with {', '.join(unknown)}",
            fix="set tp=1, or choose a dense model such as llama3",
        )
    part, extent = "features", module.get_parameter(next(iter(known))).shape[0]
    if isinstance(module, GroupedQueryAttention):
        part, extent = "key/value heads", module.config.num_kv_heads
    if extent % size:
        raise CaseError(
            f"{name} does not split evenly over tensor-parallel ranks",
            expected=f"{part} a multiple of tp={size}",
            found=f"{extent} {part}",
            fix="choose a tp that divides them",
        )


def _splitting_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward computes this rank's part of the layer between the two sums."""

    def forward(self: nn.Module, x: Tensor, *others: Any) -> Tensor:
        return SumOutput.apply(cls.forward(self, SumGradient.apply(x, TENSOR), *others), TENSOR)

    return type(f"Split{cls.__name__}", (cls,), {"forward": forward})
