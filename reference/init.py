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

EXPONENTS = 7
"""How many powers of two the rows of a spread tensor are scaled by: from 2^-3 to 2^3."""


def initial_values(name: str, shape: Sequence[int], seed: int, *, spread: bool = False) -> Tensor:
    """The whole initial tensor of a parameter or buffer, by its fully qualified name: float32, on the CPU.

    With `spread`, values are made to show what plain ones hide: rows are scaled by powers of two that differ from row
    to row, so that sums have terms of unlike size; weights of norms lie between 0.5 and 1.5, where 1 would make a
    product exact; and expert biases between -0.05 and 0.05.

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
    if spread:
        return _spread(name, shape, seed)
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


def _spread(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Plain values, so changed. One row of seven has each exponent; which, goes by its index."""
    if len(shape) == 1:
        generator = torch.Generator(device="cpu").manual_seed(stream_seed(name, seed))
        unit = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu").sub_(0.5)
        return unit.mul_(0.1) if name.endswith("expert_bias") else unit.add_(1.0)
    exponents = torch.arange(shape[-2], device="cpu") * 3 % EXPONENTS - EXPONENTS // 2
    return initial_values(name, shape, seed) * torch.exp2(exponents.float()).unsqueeze(-1)


@torch.no_grad()
def spread_biases(module: nn.Module, seed: int) -> None:
    """Write spread values into expert biases, which no rank shards."""
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias") and not buffer.is_meta:
            buffer.copy_(initial_values(name, tuple(buffer.shape), seed, spread=True))


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
