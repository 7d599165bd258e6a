"""Pairs of functions that users take for equal, for `prove_pairs.py`: each in two ways to write it, with its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from bitproof.harness.powers.proofs.prover.evaluate import same_bits

Draw = Callable[[torch.dtype, int], tuple[Any, ...]]
"""Inputs of a dtype, at a size: new ones at each call."""


def drawn(*shapes: tuple[int, ...]) -> Draw:
    """Tensors of these shapes; each size is multiplied by `size`, but for those that are negative."""

    def draw(dtype: torch.dtype, size: int) -> tuple[Any, ...]:
        return tuple((torch.randn([abs(n) if n < 0 else n * size for n in s]) * 2).to(dtype) for s in shapes)

    return draw


def labelled(dtype: torch.dtype, size: int) -> tuple[Any, ...]:
    """Logits and classes."""
    return torch.randn(4 * size, 5).to(dtype), torch.randint(0, 5, (4 * size,))


def masked(dtype: torch.dtype, size: int) -> tuple[Any, ...]:
    """Scores and a mask of some."""
    x = torch.randn(4 * size, 6 * size)
    return x.to(dtype), torch.rand(4 * size, 6 * size) < 0.5


def by_hand_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    """Log-softmax over the last dim, and the loss of it."""
    return F.nll_loss(F.log_softmax(x, dim=-1), y)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """As models write it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def chunked_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An MLP, half of the rows after the other."""
    return torch.cat([F.relu(part @ up) @ down for part in x.chunk(2)])


def columns(x: Tensor, w: Tensor) -> Tensor:
    """Two ranks' columns of a product, joined."""
    return torch.cat([x @ part for part in w.chunk(2, dim=1)], dim=1)


def adamw(foreach: bool) -> Callable[..., Any]:
    """A step of AdamW."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().sum().backward()
        before = [group["foreach"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        optimizer.step()
        for group, was in zip(optimizer.param_groups, before, strict=True):
            group["foreach"] = was  # else the steps leave other settings behind
        optimizer.zero_grad()

    return step


def adamw_inputs(dtype: torch.dtype, size: int) -> tuple[Any, ...]:
    """A model, an AdamW that made its state, and an input."""
    model = nn.Sequential(nn.Linear(4 * size, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(5, 4 * size).to(dtype)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """RoPE by complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(turns.float())).flatten(-2)


def rotated_by_hand(x: Tensor, turns: Tensor) -> Tensor:
    """The same by real numbers."""
    a, b = x.float()[..., ::2], x.float()[..., 1::2]
    c, s = turns.float().unbind(-1)
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


def rope_inputs(dtype: torch.dtype, size: int) -> tuple[Any, ...]:
    """Queries, and cosines and sines."""
    return torch.randn(3, 8 * size).to(dtype), torch.randn(3, 4 * size, 2).to(dtype)


def with_gradient(f: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function's value and the gradients of its sum."""

    def both(*inputs: Any) -> Any:
        given = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        value = f(*given)
        wanted = [x for x in given if x.requires_grad]
        return (value.detach(), *torch.autograd.grad(value.float().square().sum(), wanted))

    return both


def _where(x: Tensor, m: Tensor) -> Tensor:
    return torch.where(m, -math.inf, x)


def _in_place(x: Tensor, m: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(m, 0.5)
    return y


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Draw]] = {
    "softmax, dim 1 and -1": (lambda x: x.softmax(1), lambda x: x.softmax(-1), drawn((4, 6))),
    "softmax of 4 dims, forward and backward": (
        with_gradient(lambda x: x.softmax(-1)),
        with_gradient(lambda x: x.softmax(3)),
        drawn((2, 3, 4, 5)),
    ),
    "cross_entropy, log_softmax and nll_loss": (
        with_gradient(F.cross_entropy),
        with_gradient(by_hand_cross_entropy),
        labelled,
    ),
    "rms_norm, by hand": (
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
        rms_norm,
        drawn((3, 6), (6,)),
    ),
    "rms_norm, by hand, with gradients": (
        with_gradient(lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5)),
        with_gradient(rms_norm),
        drawn((3, 6), (6,)),
    ),
    "masked_fill, where, minus infinity": (lambda x, m: x.masked_fill(m, -math.inf), _where, masked),
    "masked_fill, where, with gradients": (
        with_gradient(lambda x, m: x.masked_fill(m, 0.0)),
        with_gradient(lambda x, m: torch.where(m, torch.zeros_like(x), x)),
        masked,
    ),
    "masked_fill in place, where": (_in_place, lambda x, m: torch.where(m, torch.full_like(x, 0.5), x), masked),
    "mean over (2, 3) and (-1, -2)": (
        lambda x: x.mean((2, 3)),
        lambda x: x.mean((-1, -2)),
        drawn((2, 3, 4, 5)),
    ),
    "sum over dims in another order": (lambda x: x.sum((0, 2)), lambda x: x.sum((2, 0)), drawn((3, 4, 5))),
    "mean, sum and division": (lambda x: x.mean(-1), lambda x: x.sum(-1) / x.shape[-1], drawn((4, 6))),
    "pow 3 and 3.0": (lambda x: x.pow(3), lambda x: x**3.0, drawn((4, 6))),
    "square and pow 2": (torch.square, lambda x: x.pow(2), drawn((4, 6))),
    "pow 2 and a product": (lambda x: x**2, lambda x: x * x, drawn((4, 6))),
    "clamp at 0 and 0.0": (lambda x: x.clamp(min=0), lambda x: x.clamp(min=0.0), drawn((4, 6))),
    "relu6, hardtanh": (F.relu6, lambda x: F.hardtanh(x, 0.0, 6.0), drawn((4, 6))),
    "silu, x * sigmoid(x)": (F.silu, lambda x: x * torch.sigmoid(x), drawn((4, 6))),
    "linear, einsum": (
        lambda x, w: F.linear(x, w),
        lambda x, w: torch.einsum("bi,oi->bo", x, w),
        drawn((4, 6), (5, 6)),
    ),
    "linear, product with a transpose": (lambda x, w: F.linear(x, w), lambda x, w: x @ w.t(), drawn((4, 6), (5, 6))),
    "linear with a bias, product and sum": (
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: x @ w.t() + b,
        drawn((4, 6), (5, 6), (5,)),
    ),
    "an MLP, in chunks of rows": (lambda x, u, d: F.relu(x @ u) @ d, chunked_mlp, drawn((4, 6), (6, 8), (8, 6))),
    "a product, by columns": (lambda x, w: x @ w, columns, drawn((4, 6), (6, 8))),
    "AdamW, one by one and foreach": (adamw(False), adamw(True), adamw_inputs),
    "RoPE, complex and real": (rotated, rotated_by_hand, rope_inputs),
    "RoPE, complex, of a copy": (rotated, lambda x, t: rotated(x.clone(), t * 1), rope_inputs),
    "layer_norm, by hand": (
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(),
        drawn((4, 6)),
    ),
    "chunk and cat": (lambda x: x, lambda x: torch.cat(x.chunk(3, -1), dim=1), drawn((4, 6))),
    "stack, cat of unsqueezed": (
        lambda x, y: torch.stack([x, y], -1),
        lambda x, y: torch.cat([x[..., None], y[..., None]], -1),
        drawn((4, 6), (4, 6)),
    ),
    "transpose, permute": (lambda x: x.transpose(-1, -2) * 2, lambda x: x.permute(0, 2, 1) * 2, drawn((2, 3, 4))),
    "flatten, reshape": (lambda x: x.flatten(1).exp(), lambda x: x.reshape(len(x), -1).exp(), drawn((2, 3, 4))),
    "gelu, by erf": (F.gelu, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), drawn((4, 6))),
    "argmax over the last dim": (lambda x: x.argmax(-1), lambda x: x.argmax(1), drawn((4, 6))),
    "topk": (lambda x: x.topk(2)[0], lambda x: x.topk(2, dim=1)[0], drawn((4, 6))),
    "cumsum": (lambda x: x.cumsum(-1), lambda x: x.cumsum(1), drawn((4, 6))),
    "gather": (
        lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
        lambda x: x.gather(1, x.argmax(1, keepdim=True)),
        drawn((4, 6)),
    ),
    "add with alpha 1.0": (lambda x, y: torch.add(x, y, alpha=1.0), lambda x, y: x + y, drawn((4, 6), (4, 6))),
    "scores, divided by 4": (lambda x, y: x @ y / 4, lambda x, y: (x @ y) * 0.25, drawn((4, 6), (6, 4))),
    "leaky_relu, where": (
        lambda x: F.leaky_relu(x, 0.5),
        lambda x: torch.where(x > 0, x, x * 0.5),
        drawn((4, 6)),
    ),
}


DTYPES, SIZES = (torch.float32, torch.float64, torch.bfloat16), (1, 7)


def differs(name: str, dtype: torch.dtype, size: int, sets: int = 8) -> bool:
    """Whether the two sides of a pair have other bits when both run on drawn inputs of a dtype, at a size."""
    f, g, draw = PAIRS[name]
    for number in range(sets):
        torch.manual_seed(number)
        if draw is adamw_inputs:
            outputs = [_trained(side, draw, dtype, size, number) for side in (f, g)]
        else:
            inputs = draw(dtype, size)
            outputs = [_flat(side(*(x.clone() for x in inputs))) for side in (f, g)]
        if not all(map(same_bits, *outputs)):
            return True
    return False


def _trained(step: Callable[..., Any], draw: Draw, dtype: torch.dtype, size: int, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model, optimizer, x = draw(dtype, size)
    step(model, optimizer, x)
    return [x.detach() for x in model.parameters()]


def _flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for part in found for x in _flat(part)]
