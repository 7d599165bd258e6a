"""Initial values by name: every parameter has its own random stream, so the order of initialization does not matter.

A rank with a shard takes a slice of the whole tensor, so values do not depend on how parameters are sharded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.rope import RotaryEmbedding

ZERO_BUFFERS = ("expert_bias", "tokens_per_expert")

EXPONENTS = 7
"""With `spread`, the rows of a tensor are scaled by this many powers of two: from 2^-3 to 2^3."""

LARGEST = 511
"""With `spread`, the largest element of an embedding before scaling. float32 adds 64 squares of nine bits without
rounding.
"""
UNCHOSEN, TIED = 1, (3, 4)
"""With `spread`, the expert that no token chooses, and two experts with equal router weights and biases."""
RARELY = -0.6
"""With `spread`, the bias of the last expert, which then gets few tokens."""


def initial_values(name: str, shape: Sequence[int], seed: int, *, spread: bool = False) -> Tensor:
    """Return the whole initial tensor of the parameter or buffer `name`: float32, on the CPU, with equal bits on all
    machines.

    | name or shape                       | values                                            |
    |-------------------------------------|---------------------------------------------------|
    | `expert_bias`, `tokens_per_expert`  | 0                                                 |
    | `*norm.weight`                      | 1                                                 |
    | `*embeddings.weight`                | uniform, standard deviation 1                     |
    | two or more dims, (..., out, in)    | uniform, standard deviation 1 / sqrt(in)          |

    With `spread`, other values show rounding errors that these values hide:

    - Rows are scaled by different powers of two, so that sums have terms of different size.
    - Weights of norms are between 0.5 and 1.5, since a multiplication by 1 is exact.
    - Embeddings are the result of `near_midpoints`.
    - The biases of most experts are between -0.05 and 0.05. No token chooses expert 1, and few choose the last expert.
    - At the start, experts 3 and 4 have equal scores and biases.

    Raises CaseError for a name and shape without a rule.
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
    # Uniform, not normal: a uniform draw is an integer scaled by a power of two, times a correctly rounded factor.
    # Logarithms and cosines, which a normal draw needs, may have other bits on another machine. A uniform draw of width
    # w has the standard deviation w / sqrt(12).
    return unit.sub_(0.5).mul_(2 * math.sqrt(3) * std)


def _spread(name: str, shape: Sequence[int], seed: int) -> Tensor:
    if len(shape) == 1:
        generator = torch.Generator(device="cpu").manual_seed(stream_seed(name, seed))
        unit = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu").sub_(0.5)
        return _spread_bias(unit) if name.endswith("expert_bias") else unit.add_(1.0)
    # Steps of 3 modulo 7 take all seven exponents in turn, so neighbouring rows differ by a factor of 8 or more.
    exponents = torch.arange(shape[-2], device="cpu") * 3 % EXPONENTS - EXPONENTS // 2
    if name.endswith("embeddings.weight"):
        generator = torch.Generator(device="cpu").manual_seed(stream_seed(name, seed))
        unit = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu").sub_(0.5)
        # Divided by 256, integers up to 511 become elements below 2; a power of two scales them exactly.
        return near_midpoints(unit.mul_(2 * LARGEST).round_(), torch.exp2(exponents.double()) / 256)
    values = initial_values(name, shape, seed) * torch.exp2(exponents.float()).unsqueeze(-1)
    if name.endswith("router.weight") and shape[0] > max(TIED):
        # Equal rows give two experts equal scores for every token, so the choice between them is a tie.
        values[TIED[1]] = values[TIED[0]]
    return values


# V rows, D elements of a row, K choices for a row's first two elements


def near_midpoints(whole_VD: Tensor, scales_V: Tensor) -> Tensor:
    """Replace the first two elements of each row, then scale each row by its power of two. Returns (V, D).

    With the new elements, sqrt(mean(x^2) + 1e-6) over the row is near the midpoint between two float32 numbers.
    """
    # At a midpoint an incorrectly rounded root is wrong. A model's first norm takes a root per distinct token, and of
    # random rows only one in two hundred would show the error.
    # K is 32 * 32. Integers of nine bits have squares whose sums are exact in any order.
    ends = torch.arange(LARGEST - 31, LARGEST + 1, dtype=torch.float64, device="cpu")
    pairs_K = (ends.square().unsqueeze(1) + ends.square()).flatten()
    rest_V = whole_VD[:, 2:].double().square().sum(1)
    means_VK = (rest_V.unsqueeze(1) + pairs_K) * (scales_V.square() / whole_VD.shape[1]).unsqueeze(1)
    # As in the model's norm: eps is a float32 number, and the sum is rounded to float32.
    means_VK = (means_VK + torch.tensor(1e-6, device="cpu").double()).float().double()
    roots_VK = means_VK.sqrt()
    # The float64 root only chooses the interval between two float32 numbers; the comparison below uses squares.
    ulps_VK = torch.exp2(roots_VK.log2().floor()) * 2.0**-23
    middles_VK = ((roots_VK / ulps_VK).floor() + 0.5) * ulps_VK
    # Twice the distance of the root from the midpoint in ULPs, since root^2 - middle^2 is about 2 middle (root -
    # middle).
    distances_VK = (means_VK - middles_VK.square()).abs() / (middles_VK * ulps_VK)
    nearest_VK = distances_VK == distances_VK.min(1, keepdim=True).values
    places_K = torch.arange(len(pairs_K), device="cpu")
    chosen_V = torch.where(nearest_VK, places_K, len(pairs_K)).min(1).values  # the first of equal ones
    whole_VD[:, 0], whole_VD[:, 1] = ends[chosen_V // len(ends)], ends[chosen_V % len(ends)]
    return whole_VD * scales_V.float().unsqueeze(1)


def _spread_bias(unit_E: Tensor) -> Tensor:
    """Turn draws between -0.5 and 0.5 into expert biases between -0.05 and 0.05, with the exceptions of
    `initial_values`.
    """
    bias_E = unit_E.mul_(0.1)
    if len(bias_E) > max(TIED) + 1:
        bias_E[UNCHOSEN] = -4.0  # sigmoid scores lie between 0 and 1
        bias_E[-1] = RARELY
        bias_E[TIED[1]] = bias_E[TIED[0]]
    return bias_E


@torch.no_grad()
def spread_biases(module: nn.Module, seed: int) -> None:
    """Write the initial values with `spread=True` into all buffers `expert_bias`.

    Every rank has these buffers whole.
    """
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias") and not buffer.is_meta:
            buffer.copy_(initial_values(name, tuple(buffer.shape), seed, spread=True))


def stream_seed(name: str, seed: int) -> int:
    """Return the seed of a tensor's random stream: the first 64 bits of blake2b over seed and name."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@torch.no_grad()
def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Write initial values into all parameters and buffers of an unsharded module, on any device.

    `prefix` is the module's own name with a trailing dot, if it is part of a larger module.
    """
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_values(prefix + name, parameter.shape, seed))
    initialize_buffers(module)


@torch.no_grad()
def initialize_buffers(module: nn.Module) -> None:
    """Zero the experts' buffers, and write the tables of rotary embeddings.

    After `to_empty`, both are uninitialized.
    """
    for part in module.modules():
        if isinstance(part, RotaryEmbedding):
            part.reset_tables()
    for name, buffer in module.named_buffers():
        if name.rsplit(".", 1)[-1] in ZERO_BUFFERS:
            buffer.zero_()
