"""The norm of all gradients of a step over all ranks, as training loops use it for clipping."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bitproof.reference.layers.ordered_sum import ordered_sum
from bitproof.reference.parallel.collectives import all_reduce
from bitproof.reference.parallel.fsdp import Sharding
from bitproof.reference.parallel.mesh import FSDP, TENSOR, Mesh


@torch.no_grad()
def gradient_norm(gradients: Mapping[str, Tensor], shardings: Mapping[str, Sharding], mesh: Mesh) -> Tensor:
    """Return the square root of the sum of squares of all gradients, as a float32 scalar that is equal on all ranks.

    The sum has a fixed order. A gradient that several ranks have in full counts once.
    """
    # The order: this rank's gradients as given, then the ranks of `fsdp`, then those of `tp`. Padding is zero.
    # A gradient that another rank counts adds 0 here.
    squares = [
        gradient.float().square().sum() * float(_counts(shardings[name], mesh)) for name, gradient in gradients.items()
    ]
    total = all_reduce(ordered_sum(torch.stack(squares), 0).reshape(1), FSDP)
    return all_reduce(total, TENSOR).sqrt().squeeze(0) if mesh.size(TENSOR) > 1 else total.sqrt().squeeze(0)


def _counts(sharding: Sharding, mesh: Mesh) -> bool:
    is_first = sharding.copies == 1 or mesh.coordinate(TENSOR) == 0
    return is_first and (not sharding.is_replicated or mesh.coordinate(sharding.group) == 0)
