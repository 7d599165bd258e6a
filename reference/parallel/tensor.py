"""Tensor parallelism: the ranks of a tensor group share attention and feed-forward layers.

Each rank computes whole heads and whole hidden features. So a weight whose outputs are heads or features is split by
output (dim 0), and a weight whose inputs they are is split by input (dim 1). A rank then has only a partial sum of the
layer's output, and each layer needs two sums over ranks (https://arxiv.org/abs/1909.08053, section 3):

    forward     the layer's output: the sum of the ranks' partial sums
    backward    the gradient of the layer's input: the sum of the gradients through each rank's own features

Both sums use the tensor's dtype and, on gloo, rank order. So all ranks of a tensor group have equal bits outside split
layers.

- Norms, embeddings and the output layer are whole on every rank. Every rank computes the same gradient of them, so no
  sum is needed.
- Some parameters inside a split layer are whole, too: projections to latents, norms over single heads, routers. A rank
  has only the part of their gradient from its own heads or tokens, so these parts are summed over the tensor group.
- With `Parallelism.sequence`, a rank has only its own tokens outside split layers (see `sequence`). The gradients of
  norms between layers are then summed over the tensor group, too.

In a mixture of experts, the shared experts are split by features. For the routed experts, the ranks divide the tokens:

1. Every rank routes and counts all T tokens.
2. Each of the W ranks sends only its own T / W adjacent tokens to the experts, so no token is sent twice.
3. The result is zero for the tokens of other ranks. The partial sum of the shared experts is added to it.
4. The sum over the ranks is the layer's output.
"""

# W ranks of the tensor group, T tokens of a rank's text, t of one share (T / W)

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.attention import LatentAttention
from bitproof.reference.layers.feed_forward import FeedForward
from bitproof.reference.layers.grouped_query_attention import GroupedQueryAttention
from bitproof.reference.layers.moe import MoE
from bitproof.reference.layers.rms_norm import RMSNorm
from bitproof.reference.layers.router import Routing, count_rows
from bitproof.reference.parallel.collectives import all_reduce
from bitproof.reference.parallel.mesh import TENSOR, Mesh
from bitproof.reference.parallel.sequence import GatherInput, GatherWhole, KeepOwn, ScatterOutput

_FEED_FORWARD: dict[str, int | None] = {"w1.weight": 0, "w3.weight": 0, "w2.weight": 1}

SPLIT_DIMS: dict[type[nn.Module], dict[str, int | None]] = {
    GroupedQueryAttention: {
        **{"wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "wo.weight": 1},
        **{"q_norm.weight": None, "k_norm.weight": None},
    },
    LatentAttention: {
        **{"wq.weight": 0, "wq_b.weight": 0, "wkv_b.weight": 0, "wo.weight": 1},
        **{"wq_a.weight": None, "q_norm.weight": None, "wkv_a.weight": None, "kv_norm.weight": None},
    },
    FeedForward: _FEED_FORWARD,
    MoE: {"router.weight": None, **{f"shared_experts.{name}": dim for name, dim in _FEED_FORWARD.items()}},
}
"""The layers that can be split, with the dim along which each parameter is split. None: the parameter stays whole.

Routed experts are missing here, since the expert group splits them.
"""

_ROUTED = "experts."


class SumGradient(torch.autograd.Function):
    """The identity, at the input of a split layer. Its backward sums the gradient over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.contiguous(), ctx.group), None


class SumOutput(torch.autograd.Function):
    """The sum over the ranks of a group, at the output of a split layer. Its backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank has the whole gradient of the output.
        return grad, None


def split_layers(
    model: nn.Module, mesh: Mesh, num_tokens: int, only: Collection[str] | None = None
) -> dict[str, int | None]:
    """Split every attention and feed-forward layer of a decoder, in place, among the ranks of a tensor group.

    Returns parameter name -> dim along which `fully_shard` must split the parameter. The dim is None if the parameter
    stays whole, and its gradient must be summed over the group. The dict is empty without tensor parallelism.

    - `num_tokens`: the number of tokens in a call of a layer.
    - `only`: the names of the layers to split; None for all.

    Raises CaseError for a layer that cannot be split evenly or at all, for an unknown name in `only`, and for a mixture
    of experts missing from `only`.
    """
    size = mesh.size(TENSOR)
    if size == 1:
        return {}
    _check_only(model, only)
    by_sequence = mesh.parallelism.sequence
    device = next(model.parameters()).device

    def register_coordinate(module: nn.Module) -> None:
        # As a buffer, the coordinate is an input of a traced graph, whose code is then equal on all ranks.
        coordinate = torch.tensor([mesh.coordinate(TENSOR)], device=device)
        module.register_buffer("tensor_coordinate", coordinate, persistent=False)

    dims: dict[str, int | None] = {}
    for layer, block in model.get_submodule("layers").named_children():
        for name, module in block.named_children():
            path = f"layers.{layer}.{name}"
            if isinstance(module, RMSNorm):
                dims |= {f"{path}.weight": None} if by_sequence else {}
            elif only is None or path in only:
                dims |= split_dims(path, module, size, num_tokens)
                if isinstance(module, MoE):
                    register_coordinate(module)
                # Only the class is replaced, so the module's parameters, their names and its hooks stay.
                module.__class__ = _splitting_class(type(module), size, by_sequence)
    if by_sequence:
        dims["norm.weight"] = None
        for name, class_of in (("tok_embeddings", _keeping_class), ("output", _gathering_class)):
            module = model.get_submodule(name)
            register_coordinate(module)
            module.__class__ = class_of(type(module), size)
    return dims


def split_dims(path: str, module: nn.Module, size: int, num_tokens: int) -> dict[str, int | None]:
    """Return the dims along which a layer's parameters are split over `size` ranks, as `split_layers` returns them.

    Raises CaseError for a layer that cannot be split evenly or at all.
    """
    known = _known_parameters(path, module)
    _refuse_unless_split_evenly(path, module, size, num_tokens)
    return {f"{path}.{own}": dim for own, dim in known.items()}


def _check_only(model: nn.Module, only: Collection[str] | None) -> None:
    layers = model.get_submodule("layers")
    can_split = {
        f"layers.{layer}.{name}": module
        for layer, block in layers.named_children()
        for name, module in block.named_children()
        if not isinstance(module, RMSNorm)
    }
    if only is None:
        return
    if unknown := set(only) - can_split.keys():
        raise CaseError(
            "a plan splits layers that the model does not have",
            expected=", ".join(can_split),
            found=", ".join(sorted(unknown)),
        )
    if whole := [path for path, module in can_split.items() if isinstance(module, MoE) and path not in only]:
        # Each tensor rank would send every token, so an expert would get each token and its gradient W times.
        raise CaseError(
            "a mixture of experts cannot be whole on the ranks of a tensor group",
            expected="every mixture of experts among the layers that are split, where tp > 1",
            found=", ".join(whole),
        )


def _known_parameters(path: str, module: nn.Module) -> dict[str, int | None]:
    known = SPLIT_DIMS.get(type(module), {})
    own = [name for name, _ in module.named_parameters()]
    routed = [name for name in own if isinstance(module, MoE) and name.startswith(_ROUTED)]
    if unknown := [name for name in own if name not in known and name not in routed]:
        raise CaseError(
            f"{path} cannot be split over tensor-parallel ranks",
            expected="a layer of a known kind: " + ", ".join(cls.__name__ for cls in SPLIT_DIMS),
            found=f"{type(module).__name__} with {', '.join(unknown)}",
            fix="set tp=1, or choose another model",
        )
    return {name: dim for name, dim in known.items() if name in own}


def _refuse_unless_split_evenly(path: str, module: nn.Module, size: int, num_tokens: int) -> None:
    extents: dict[str, int] = {}
    if isinstance(module, GroupedQueryAttention):
        # A rank has whole key/value heads, with the query heads that read them.
        extents["key/value heads"] = module.config.num_kv_heads
    elif isinstance(module, LatentAttention):
        extents["heads"] = module.config.num_heads
    elif isinstance(module, FeedForward):
        extents["features"] = module.w1.weight.shape[0]
    elif isinstance(module, MoE):
        extents["tokens a call"] = num_tokens
        if module.shared_experts is not None:
            extents["features of shared experts"] = module.shared_experts.w1.weight.shape[0]
    for part, extent in extents.items():
        if extent % size:
            raise CaseError(
                f"{path} does not split evenly over tensor-parallel ranks",
                expected=f"{part} a multiple of tp={size}",
                found=f"{extent} {part}",
                fix="choose a tp that divides them",
            )


def _keeping_class(cls: type[nn.Module], size: int) -> type[nn.Module]:
    """Return a subclass of `cls` that returns only this rank's part of the sequence."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return KeepOwn.apply(cls.forward(self, x), self.get_buffer("tensor_coordinate"), size, TENSOR)  # type: ignore[no-untyped-call]

    return type(f"Keeping{cls.__name__}", (cls,), {"forward": forward})


def _gathering_class(cls: type[nn.Module], size: int) -> type[nn.Module]:
    """Return a subclass of `cls` that takes this rank's part of the sequence, and first gathers the other parts."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, x: Tensor, *others: Any) -> Tensor:
        whole = GatherWhole.apply(x, self.get_buffer("tensor_coordinate"), size, TENSOR)  # type: ignore[no-untyped-call]
        return cls.forward(self, whole, *others)

    return type(f"Gathering{cls.__name__}", (cls,), {"forward": forward})


def _splitting_class(cls: type[nn.Module], size: int, by_sequence: bool) -> type[nn.Module]:
    """Return a subclass of `cls` that computes this rank's part of the layer.

    It sums the output over ranks and, in backward, the gradient of the input. With `by_sequence`, it takes and returns
    only this rank's part of the sequence.
    """

    signature = inspect.signature(cls.forward)
    # The first parameter after `self` is the layer's input.
    own = list(signature.parameters)[1]

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(self, *args, **kwargs).arguments
        if by_sequence:
            x = GatherInput.apply(given.pop(own), size, TENSOR)  # type: ignore[no-untyped-call]
            return ScatterOutput.apply(cls.forward(**given, **{own: x}), size, TENSOR)  # type: ignore[no-untyped-call]
        x = SumGradient.apply(given.pop(own), TENSOR)  # type: ignore[no-untyped-call]
        return SumOutput.apply(cls.forward(**given, **{own: x}), TENSOR)  # type: ignore[no-untyped-call]

    # The forward of `MoE` calls `_routed`, which here sends only this rank's share of the tokens to the experts.
    routed = {"_routed": functools.partialmethod(_routed_share, cls, size)} if issubclass(cls, MoE) else {}
    return type(f"Split{cls.__name__}", (cls,), {"forward": forward, **routed})


def _routed_share(self: MoE, cls: type[MoE], size: int, x_TD: Tensor, routing: Routing) -> Tensor:
    """Return the routed experts' output for this rank's share of the tokens, with zeros for all
    other tokens: (T, D).
    """

    coordinate = self.get_buffer("tensor_coordinate")

    def own(x_T: Tensor) -> Tensor:
        return x_T.unflatten(0, (size, -1)).index_select(0, coordinate).flatten(0, 1)

    experts_tK = own(routing.experts_TK)
    counts_E = count_rows(experts_tK, routing.counts_E.shape[0])
    y_tD = cls._routed(self, own(x_TD), Routing(experts_tK, own(routing.weights_TK), counts_E))
    # Zeros for the other ranks' tokens, so that the sum over the ranks adds each token once.
    others_WtD = y_tD.new_zeros(size, *y_tD.shape)
    return others_WtD.index_copy(0, coordinate, y_tD.unsqueeze(0)).flatten(0, 1)
