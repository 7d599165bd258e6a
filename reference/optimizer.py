"""The last part of a step: experts are balanced, and AdamW updates this rank's shards."""

# E experts, M MoE layers

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitproof.harness.case import AdamW
from bitproof.reference.parallel.collectives import all_reduce
from bitproof.reference.parallel.mesh import FSDP


class ShardedAdamW:
    """torch's AdamW on this rank's float32 shards. It computes elementwise, so sharding changes no bit."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamW) -> None:
        self._parameters = dict(parameters)
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._adamw.step()
        self._adamw.zero_grad()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) for moments and step counts. The name is `<parameter>.<state>`."""
        for name, parameter in self._parameters.items():
            for state, value in self._adamw.state[parameter].items():
                yield f"{name}.{state}", value

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            parameter, _, key = name.rpartition(".")
            self._adamw.state[self._parameters[parameter]][key] = value


def layers_with_experts(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "tokens_per_expert") and hasattr(m, "expert_bias")]


@torch.no_grad()
def balance_experts(layers: Sequence[Any], rate: float) -> None:
    """Move each expert's bias by `rate` toward balance, and reset its token count to zero.

    `rate` is added to the bias of an expert with fewer tokens than the mean over all experts, and subtracted from that
    of an expert with more (https://arxiv.org/abs/2408.15664).
    """
    if not layers:
        return
    # One all-reduce for all layers. The ranks of the `fsdp` group read different text, and each counts all its tokens.
    counts_ME = all_reduce(torch.stack([layer.tokens_per_expert for layer in layers]), FSDP)
    for layer, counts_E in zip(layers, counts_ME, strict=True):
        layer.expert_bias.add_(torch.sign(counts_E.mean() - counts_E), alpha=rate)
        layer.tokens_per_expert.zero_()
