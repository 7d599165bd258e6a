"""Random chains of small modules, random patterns: the chunked graph has the bits of eager's chunks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    assert_as_eager,
    batch,
    chunked,
    differing,
    parameter,
    run_eager,
    run_graph,
    trace,
)


class Residual(nn.Module):
    """Adds a module's input to its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def _count(module: Applied, x: Tensor) -> Tensor:
    module.seen.mul_(0.5).add_(x.detach().float().mean())
    return x * module.w


PARTS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(D, D),
    lambda: nn.Linear(D, D, bias=False),
    lambda: nn.LayerNorm(D),
    lambda: nn.RMSNorm(D),
    lambda: nn.Sequential(nn.Linear(D, 16), nn.SiLU(), nn.Linear(16, D)),
    lambda: Applied(lambda m, x: gelu(x) * m.w + m.b, w=parameter(D), b=parameter(D)),
    lambda: Applied(lambda m, x: silu(x @ m.w.t()) * (x @ m.v), w=parameter(D, D), v=parameter(D, D)),
    lambda: Applied(lambda m, x: (x.reshape(-1, D) @ m.w).view(x.shape), w=parameter(D, D)),
    lambda: Applied(lambda m, x: x * torch.softmax(x @ m.w, -1), w=parameter(D, D)),
    lambda: Applied(lambda m, x: (x @ m.w).transpose(0, 1).contiguous().transpose(0, 1), w=parameter(D, D)),
    lambda: Applied(lambda m, x: x * m.w / x.shape[0], w=parameter(D)),
    lambda: Applied(_count, w=parameter(D), seen=torch.zeros(())),
)


def random_model(choice: random.Random, dtype: torch.dtype) -> Layers:
    """Two or three layers, each of one to three parts, some with a residual, in float32 or bfloat16."""

    def layer() -> nn.Module:
        parts = [choice.choice(PARTS)() for _ in range(choice.randint(1, 3))]
        parts = [Residual(part) if choice.random() < 0.4 else part for part in parts]
        return nn.Sequential(*parts)

    torch.manual_seed(choice.randint(0, 1000))
    return Layers(*(layer() for _ in range(choice.randint(2, 3)))).to(dtype)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed % 2 else pytest.mark.slow) for seed in range(24)])
def test_a_random_model_chunked_by_a_random_pattern_has_eagers_bits(seed: int) -> None:
    choice = random.Random(seed)
    dtype = choice.choice([torch.float32, torch.bfloat16])
    model = random_model(choice, dtype)
    pattern = choice.choice(["layers.*", "layers.*.0", "layers.0", "layers.1"])
    assert_as_eager(model, pattern, choice.choice(["batch", "seq"]), batch(dtype, seed))


def test_a_model_chunked_by_another_pattern_has_not() -> None:
    """Without this, the test above might pass because chunks change no bits of such small models."""
    changed = 0
    for seed in range(2):
        choice = random.Random(seed)
        model = random_model(choice, torch.bfloat16)
        x = batch(torch.bfloat16, seed)
        joint = trace(model, x)
        changed += bool(differing(run_graph(chunked(joint, "layers.*"), joint, model, x), run_eager(model, x)))
    assert changed == 2
