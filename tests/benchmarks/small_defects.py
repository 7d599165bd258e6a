"""The loops of `cases/examples/mesh_loop.py` with one defect each that changes about as much as rounding does.

    bitproof run ... with "candidate": "tests.benchmarks.small_defects:fsdp", "options": {"defect": "norm_eps 0 1e-6"}

A case's options name the defect and its numbers. `DEFECTS`, `HELD_OUT` and `FRESH` are what `bench_layouts.py` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitproof import Case, Mesh
from bitproof.builtin_cases.examples import mesh_loop
from bitproof.builtin_cases.examples.mesh_loop import MeshLoop

DEFECTS = (
    *(f"norm_eps {block} {eps}" for block in (0, 1) for eps in ("1e-6", "2e-5", "1.1e-5", "1e-4")),
    "norm_eps all 1e-6",
    "norm_eps all 9e-6",
    *(f"loss {factor}" for factor in ("5e-7", "1e-6", "3e-7", "-1e-6", "1e-5")),
    *(f"residual {block} {factor}" for block in (0, 1) for factor in ("1e-6", "1e-5")),
    *(f"gelu {block} {factor}" for block in (0, 1) for factor in ("1e-6", "1e-5")),
    *(f"gradient {name} {factor}" for name in ("up", "norm", "embedding") for factor in ("1e-6", "1e-5")),
    *(f"optimizer {setting}" for setting in ("eps 2e-8", "eps 1e-7", "weight_decay 0.0101", "lr 1.00001e-2")),
    "optimizer betas 0.99901",
    "smoothing 1e-6",
    "tensor_cores 0",
    "bias 0 1e-6",
)

HELD_OUT = (
    *(f"norm_eps {block} {eps}" for block in (0, 1) for eps in ("2e-6", "5e-6", "1e-7", "3e-5")),
    "norm_eps all 5e-6",
    *(f"loss {factor}" for factor in ("-5e-7", "7e-7", "2e-6")),
    *(f"residual {block} {factor}" for block in (0, 1) for factor in ("-2e-6", "5e-6")),
    *(f"gelu {block} {factor}" for block in (0, 1) for factor in ("2e-6", "-1e-6")),
    *(f"gradient {name} {factor}" for name in ("down", "output", "norm") for factor in ("2e-6", "-1e-6")),
    *(f"optimizer {setting}" for setting in ("eps 1.5e-8", "weight_decay 0.01001", "lr 1.000001e-2")),
    *("optimizer betas 0.99899", "smoothing 5e-7", "tensor_cores 1", "bias 1 5e-7", "bias 0 -1e-6"),
)
"""Others, which were drawn after a first rule was chosen: bounds of twelve runs, and a remark near them."""

FRESH = (
    *(f"count {amount}" for amount in ("1e-4", "3e-5", "-5e-5")),
    *(f"temperature {factor}" for factor in ("4e-7", "-8e-7", "3e-6")),
    *(f"initial {name} {factor}" for name in ("up", "output", "norm") for factor in ("3e-7", "-7e-7")),
    *(f"flush {size}" for size in ("1e-5", "3e-6")),
    *(f"gelu_mix {block} {share}" for block in (0, 1) for share in ("1e-3", "2e-4")),
    *(f"variance {block} {share}" for block in (0, 1) for share in ("1e-5", "3e-6")),
    *(f"last_step {factor}" for factor in ("1.000002", "0.9999995")),
    *(f"one_rank {name} {factor}" for name in ("down", "embedding") for factor in ("3e-6", "-9e-7")),
    *(f"optimizer betas {beta}" for beta in ("0.999001", "0.9990003")),
    *("optimizer eps 1.1e-8", "optimizer weight_decay 0.010003", "optimizer lr 1.0000005e-2"),
    *("norm_eps 1 1.02e-5", "norm_eps 0 9.9e-6", "residual 1 4e-7", "bias 1 2e-7", "smoothing 2e-7"),
    *(f"bits {name} {bits}" for name in ("up", "output") for bits in (5, 8)),
)
"""Others, which were written when the second test, in float64, had been chosen. `bits` alone is a loss of accuracy."""


def _norm_eps(loop: MeshLoop, block: str, eps: str) -> None:
    for norm in _blocks(loop, block, "norm"):
        norm.eps = float(eps)


def _loss(loop: MeshLoop, factor: str) -> None:
    own = loop.loss
    loop.loss = lambda rows: own(rows) * (1 + float(factor))  # type: ignore[method-assign]


def _residual(loop: MeshLoop, block: str, factor: str) -> None:
    _blocks(loop, block)[0].register_forward_hook(lambda module, args, out: out + args[0] * float(factor))


def _gelu(loop: MeshLoop, block: str, factor: str) -> None:
    _blocks(loop, block, "up")[0].register_forward_hook(lambda module, args, out: out * (1 + float(factor)))


def _gradient(loop: MeshLoop, name: str, factor: str) -> None:
    own, (first, *_) = loop.backward, [p for full, p in loop.model.named_parameters() if f"{name}.weight" in full]

    def backward() -> Tensor:
        total = own()
        assert first.grad is not None
        first.grad *= 1 + float(factor)
        return total

    loop.backward = backward  # type: ignore[method-assign]


def _optimizer(loop: MeshLoop, setting: str, value: str) -> None:
    for group in loop.optimizer.param_groups:
        if setting == "lr":  # a schedule multiplies what it finds as `initial_lr`
            group["lr"] *= float(value) / 1e-2
            loop.schedule.base_lrs = [float(value)]
        else:
            group[setting] = (0.9, float(value)) if setting == "betas" else float(value)


def _smoothing(loop: MeshLoop, amount: str) -> None:
    def loss(rows: Tensor) -> Tensor:
        logits = loop.model(rows[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), label_smoothing=float(amount))

    loop.loss = loss  # type: ignore[method-assign]


def _tensor_cores(loop: MeshLoop, block: str) -> None:
    """A product reads its input without its 7 last bits, by Dekker's splitting."""

    def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        split = args[0].detach() * 129
        return (args[0] + (split - (split - args[0].detach()) - args[0].detach()),)

    _blocks(loop, block, "up")[0].register_forward_pre_hook(rounded)


def _bias(loop: MeshLoop, block: str, amount: str) -> None:
    _blocks(loop, block, "norm")[0].register_forward_hook(lambda module, args, out: out + float(amount))


def _count(loop: MeshLoop, amount: str) -> None:
    """The mean over a number of tokens that is off."""
    own = loop.loss

    def loss(rows: Tensor) -> Tensor:
        count = rows[:, 1:].numel()
        return own(rows) * count / (count + float(amount))

    loop.loss = loss  # type: ignore[method-assign]


def _temperature(loop: MeshLoop, factor: str) -> None:
    _bare(loop).output.register_forward_hook(lambda module, args, out: out * (1 + float(factor)))


def _initial(loop: MeshLoop, name: str, factor: str) -> None:
    with torch.no_grad():
        for full, parameter in loop.model.named_parameters():
            if f"{name}.weight" in full:
                parameter.mul_(1 + float(factor))


def _flush(loop: MeshLoop, size: str) -> None:
    """Small elements of gradients are lost, as by a gradient of few bits."""

    def change(name: str, gradient: Tensor) -> None:
        gradient.masked_fill_(gradient.abs() < float(size), 0.0)

    _after_backward(loop, change)


def _gelu_mix(loop: MeshLoop, block: str, share: str) -> None:
    """A share of the approximation by tanh."""
    gelu = nn.functional.gelu

    def mixed(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        up = module.up(module.norm(args[0]))  # type: ignore[operator]
        return out + module.down(gelu(up, approximate="tanh") - gelu(up)) * float(share)  # type: ignore[operator]

    _blocks(loop, block)[0].register_forward_hook(mixed)


def _variance(loop: MeshLoop, block: str, share: str) -> None:
    """A share of the variance with one degree of freedom less."""

    def scaled(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out * (1 - float(share) / args[0].size(-1))

    _blocks(loop, block, "norm")[0].register_forward_hook(scaled)


def _last_step(loop: MeshLoop, factor: str) -> None:
    own = loop.schedule.lr_lambdas[0]
    loop.schedule.lr_lambdas[0] = lambda step: own(step) * (float(factor) if step else 1.0)


def _one_rank(loop: MeshLoop, name: str, factor: str) -> None:
    """One rank reduces a gradient that is off: of one rank, all of it."""

    def change(full: str, gradient: Tensor) -> None:
        if f"{name}.weight" in full:
            part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            part[: 1 + len(part) // 2].mul_(1 + float(factor))

    _after_backward(loop, change)


def _bits(loop: MeshLoop, name: str, bits: str) -> None:
    """A gradient loses its last bits."""

    def change(full: str, gradient: Tensor) -> None:
        if f"{name}.weight" in full:
            part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            split = part * (2 ** int(bits) + 1)
            part.copy_(split - (split - part))

    _after_backward(loop, change)


def _after_backward(loop: MeshLoop, change: Callable[[str, Tensor], None]) -> None:
    own = loop.backward

    def backward() -> Tensor:
        total = own()
        with torch.no_grad():
            for name, parameter in loop.model.named_parameters():
                assert parameter.grad is not None
                change(name, parameter.grad)
        return total

    loop.backward = backward  # type: ignore[method-assign]


def _bare(loop: MeshLoop) -> Any:
    return loop.model.module if hasattr(loop.model, "module") else loop.model


def _blocks(loop: MeshLoop, block: str, inner: str = "") -> list[Any]:
    bare = _bare(loop)
    chosen = [*bare.blocks] if block == "all" else [bare.blocks[int(block)]]
    return [each.get_submodule(inner) if inner else each for each in chosen]


APPLY: dict[str, Callable[..., None]] = {
    "norm_eps": _norm_eps,
    "loss": _loss,
    "residual": _residual,
    "gelu": _gelu,
    "gradient": _gradient,
    "optimizer": _optimizer,
    "smoothing": _smoothing,
    "tensor_cores": _tensor_cores,
    "bias": _bias,
    "count": _count,
    "temperature": _temperature,
    "initial": _initial,
    "flush": _flush,
    "gelu_mix": _gelu_mix,
    "variance": _variance,
    "last_step": _last_step,
    "one_rank": _one_rank,
    "bits": _bits,
}


def _wrong(name: str) -> Callable[[Case, Mesh], MeshLoop]:
    def factory(case: Case, mesh: Mesh) -> MeshLoop:
        loop: MeshLoop = getattr(mesh_loop, name)(case, mesh)
        what, *numbers = str(case.options["defect"]).split()
        APPLY[what](loop, *numbers)
        return loop

    return factory


ddp, fsdp, fsdp_tp, halves, ep, hsdp = map(_wrong, ("ddp", "fsdp", "fsdp_tp", "halves", "ep", "hsdp"))
