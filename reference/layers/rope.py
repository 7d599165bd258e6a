"""Rotary position embedding from tables, with two ways to scale the frequencies for longer texts.

- RoPE: Su et al. 2021, arXiv:2104.09864
- YaRN: Peng et al. 2023, arXiv:2309.00071
- Llama 3.1's scaling: published as code with the models, and in arXiv:2407.21783, section 3.4.2

B batch, S sequence, H heads, R rotated head dim, P pairs (R / 2), L table length
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitproof.harness.errors import CaseError
from bitproof.reference.layers.wide import wides


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Scaling of frequencies for texts `factor` times as long as the `original_seq_len` tokens of training.

    - A pair with more than `beta_fast` full turns over these tokens keeps its frequency.
    - A pair with fewer than `beta_slow` turns has its frequency divided by `factor`.
    - In between, the two are blended linearly.

    `mscale` is for `attention_scale`.
    """

    factor: float
    original_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0

    def attention_scale(self) -> float:
        """Return the factor on the attention softmax's scale: (0.1 mscale ln(factor) + 1)^2, or 1 if `factor` is at
        most 1.
        """
        # Squared, because published code scales both queries and keys. Published code also divides the tables, with
        # another setting, `mscale_all_dim`. DeepSeek sets both to the same value, so that the tables are not scaled,
        # and one field is enough here.
        return (0.1 * self.mscale * math.log(self.factor) + 1.0) ** 2 if self.factor > 1 else 1.0

    def scaled(self, frequencies_P: Tensor, theta: float) -> Tensor:
        """Return the scaled frequencies. `frequencies_P` are the unscaled frequencies, theta^(-2p / dim)."""
        dim = 2 * len(frequencies_P)

        def pair_that_turns(times: float) -> float:
            """Return the index, possibly fractional, of the pair that makes `times` full turns over the original
            length.
            """
            return dim * math.log(self.original_seq_len / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), dim - 1)
        pairs_P = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
        # The published ramp is at least 0.001 pairs wide, so that it never divides by zero.
        stretched_share_P = ((pairs_P - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequencies_P * (1 - stretched_share_P) + frequencies_P / self.factor * stretched_share_P


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling of frequencies for texts `factor` times as long as `original_seq_len` tokens.

    - A pair with more than `high_freq_factor` full turns over the original length keeps its frequency.
    - A pair with fewer than `low_freq_factor` turns has its frequency divided by `factor`.
    - In between, the two are blended linearly.
    """

    factor: float
    original_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def attention_scale(self) -> float:
        # Llama 3.1 does not change the softmax's scale.
        return 1.0

    def scaled(self, frequencies_P: Tensor, theta: float) -> Tensor:
        turns_P = self.original_seq_len * frequencies_P / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept_share_P = ((turns_P - self.low_freq_factor) / width).clamp(0, 1)
        return (1 - kept_share_P) * frequencies_P / self.factor + kept_share_P * frequencies_P


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The tables' length in tokens, and their frequencies: the base `theta`, and the scaling (None: unscaled)."""

    max_seq_len: int
    theta: float = 10000.0
    scaling: Yarn | Llama3Scaling | None = None


class RotaryEmbedding(nn.Module):
    """Rotates each even/odd pair of a head's elements by the angle for the token's position.

    Cosines and sines are read from float32 tables (L, P), indexed by position. A module made on the meta device has no
    values in its tables until `reset_tables`.
    """

    cos_LP: Tensor
    sin_LP: Tensor

    def __init__(self, dim: int, config: RopeConfig) -> None:
        super().__init__()
        if dim % 2:
            raise CaseError("rotary embedding turns pairs", expected="an even rope head dim", found=str(dim))
        self.dim = dim
        self.config = config
        shape = (config.max_seq_len, dim // 2)
        self.register_buffer("cos_LP", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_LP", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.wide = wides("x", "even_cos", "odd_sin", "even_sin", "odd_cos", "y")
        self.reset_tables()

    @torch.no_grad()
    def reset_tables(self) -> None:
        """Write the tables' values on their device. Does nothing on the meta device."""
        if self.cos_LP.is_meta:
            return
        # Always computed on the CPU, so that all devices agree on the tables.
        frequencies_P = rotary_frequencies(self.dim, self.config)
        positions_L = torch.arange(self.config.max_seq_len, dtype=torch.float32, device="cpu")
        angles_LP = positions_L[:, None] * frequencies_P[None, :]
        self.cos_LP.copy_(angles_LP.cos())
        self.sin_LP.copy_(angles_LP.sin())

    def forward(self, x_BSHR: Tensor, positions_BS: Tensor) -> Tensor:
        """Rotate x in float32. Returns a tensor of x's shape and dtype.

        Positions are integers below L. Folded tokens have a single dim instead of (B, S).
        """
        # Read from tables: the kernels of cos and sin may give an angle different bits in a vector's body and in its
        # tail, so that splitting the rows would change values.
        cos_BS1P = self.cos_LP[positions_BS].unsqueeze(-2)
        sin_BS1P = self.sin_LP[positions_BS].unsqueeze(-2)
        wide = self.wide
        wide_BSHR = wide["x"](x_BSHR.float())
        even_BSHP, odd_BSHP = wide_BSHR.view(*x_BSHR.shape[:-1], self.dim // 2, 2).unbind(-1)
        turned_even_BSHP = wide["even_cos"](even_BSHP * cos_BS1P) - wide["odd_sin"](odd_BSHP * sin_BS1P)
        turned_odd_BSHP = wide["even_sin"](even_BSHP * sin_BS1P) + wide["odd_cos"](odd_BSHP * cos_BS1P)
        turned_BSHP2 = torch.stack((turned_even_BSHP, turned_odd_BSHP), dim=-1)
        y_BSHR: Tensor = wide["y"](turned_BSHP2.flatten(-2))
        return y_BSHR.to(x_BSHR.dtype)


def rotary_frequencies(dim: int, config: RopeConfig) -> Tensor:
    """Return each pair's angle per position, in radians: theta^(-2p / dim), then scaled. float32 on the CPU, (P,)."""
    exponents_P = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies_P = 1.0 / config.theta**exponents_P
    return config.scaling.scaled(frequencies_P, config.theta) if config.scaling else frequencies_P
