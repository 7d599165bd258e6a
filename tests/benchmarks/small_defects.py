"""The loops of `cases/examples/mesh_loop.py` with one defect each that changes about as much as rounding does.

    bitproof run ... with "candidate": "tests.benchmarks.small_defects:fsdp", "options": {"defect": "norm_eps 0 1e-6"}

A case's options name the defect and its numbers. `DEFECTS` is what `bench_layouts.py defects` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
"""Others, which were drawn after the rule was chosen."""


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


def _blocks(loop: MeshLoop, block: str, inner: str = "") -> list[Any]:
    bare = loop.model.module if hasattr(loop.model, "module") else loop.model
    chosen = [*bare.blocks] if block == "all" else [bare.blocks[int(block)]]  # type: ignore[union-attr,index,operator]
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
}


def _wrong(name: str) -> Callable[[Case, Mesh], MeshLoop]:
    def factory(case: Case, mesh: Mesh) -> MeshLoop:
        loop: MeshLoop = getattr(mesh_loop, name)(case, mesh)
        what, *numbers = str(case.options["defect"]).split()
        APPLY[what](loop, *numbers)
        return loop

    return factory


ddp, fsdp, fsdp_tp, halves, ep, hsdp = map(_wrong, ("ddp", "fsdp", "fsdp_tp", "halves", "ep", "hsdp"))
