"""Initial values by name: every parameter has its own random stream, whoever asks and in whichever order.

A rank that holds a shard slices the whole tensor, so values do not depend on how parameters are laid out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.errors import CaseError
from reference.layers.rope import RotaryEmbedding

ZERO_BUFFERS = ("expert_bias", "tokens_per_expert")


def initial_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The whole initial tensor of a parameter or buffer, by its fully qualified name: float32, on the CPU.

    | name or shape                       | values                                            |
    |-------------------------------------|---------------------------------------------------|
    | `expert_bias`, `tokens_per_expert`  | 0                                                 |
    | `*norm.weight`                      | 1                                                 |
    | `*embeddings.weight`                | uniform, standard deviation 1                     |
    | two or more dims, (..., out, in)    | uniform, standard deviation 1 / sqrt(in)          |

    Uniform, not normal: a uniform draw is integers scaled by powers of two and one correctly rounded product, so
    all machines agree on its bits, which logarithms and cosines do not promise. No value depends on depth.
    Raises CaseError for a name and shape that no rule covers.
    """
    if name.rsplit(".", 1)[-1] in ZERO_BUFFERS:
        return torch.zeros(*shape, dtype=torch.float32, device="cpu")
    if len(shape) == 1 and name.endswith("norm.weight"):
        return torch.ones(*shape, dtype=torch.float32, device="cpu")
    if len(shape) < 2:
        raise CaseError(
            f"no rule gives {name} its initial values",
            expected="a norm's weight, or a tensor of two or more dims",
            found=f"shape {tuple(shape)}",
        )
    std = 1.0 if name.endswith("embeddings.weight") else shape[-1] ** -0.5
    generator = torch.Generator(device="cpu").manual_seed(stream_seed(name, seed))
    unit = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")
    return unit.sub_(0.5).mul_(2 * math.sqrt(3) * std)


def stream_seed(name: str, seed: int) -> int:
    """The seed of one tensor's random stream: the first 64 bits of blake2b over seed and name."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@torch.no_grad()
def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Write initial values into all parameters and buffers of an unsharded module, wherever they lie.

    `prefix` is the module's own name with a trailing dot, when it is part of a larger one.
    """
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_values(prefix + name, parameter.shape, seed))
    initialize_buffers(module)


@torch.no_grad()
def initialize_buffers(module: nn.Module) -> None:
    """Zero the expert buffers and write the rotary tables: after `to_empty`, buffers hold nothing."""
    for part in module.modules():
        if isinstance(part, RotaryEmbedding):
            part.reset_tables()
    for name, buffer in module.named_buffers():
        if name.rsplit(".", 1)[-1] in ZERO_BUFFERS:
            buffer.zero_()
