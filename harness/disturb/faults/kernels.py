"""Wrong kernels that faults insert into a graph. Some are wrong only on the last rank, or only from the second step
on."""

# R rows, N elements

from __future__ import annotations

import torch
from torch import Tensor

from bitproof.harness.disturb.faults.clock import NOW
from bitproof.harness.torch_distributed import group_named


def flipped_on_last_rank(x: Tensor) -> Tensor:
    return x.flip(0) if NOW.is_last_rank else x


def doubled_on_last_rank(x: Tensor) -> Tensor:
    return x * 2 if NOW.is_last_rank else x


def other_on_last_rank(x: Tensor, other: Tensor) -> Tensor:
    return other if NOW.is_last_rank else x


def nudged_on_last_rank(x: Tensor) -> Tensor:
    return nudged(x) if NOW.is_last_rank else x


def nudged_from_step_1(x: Tensor) -> Tensor:
    return nudged(x) if NOW.step >= 1 else x


def zeroed_from_step_1(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if NOW.step >= 1 else x


def nudged(x: Tensor) -> Tensor:
    """Return x with the element of largest magnitude moved by 1 ULP away from zero."""
    # A copy, since the kernels of a graph must not write their inputs.
    flat = x.detach().clone().reshape(-1)
    # As integers of the same width, which can count up.
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    place = flat.float().abs().argmax()
    # Floats are sign and magnitude, so the next integer is 1 ULP further from zero.
    bits[place] += 1
    return flat.reshape(x.shape)


def last_row_zeroed(x: Tensor, dim: int) -> Tensor:
    x = x.clone()
    # Zeros, as padding would leave them.
    x.select(dim, x.shape[dim] - 1).zero_()
    return x


def last_row_zeroed_on_last_rank(x: Tensor) -> Tensor:
    # A rank whose experts got no tokens has no last row.
    return last_row_zeroed(x, 0) if NOW.is_last_rank and len(x) else x


def truncated(x: Tensor) -> Tensor:
    # -65536 is 0xFFFF0000: bfloat16 is the upper half of a float32 number.
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def in_tf32(x: Tensor) -> Tensor:
    # Add half of the lowest kept bit, then clear the 13 lower bits.
    return ((x.contiguous().view(torch.int32) + 4096) & -8192).view(torch.float32)


def flushed(x: Tensor) -> Tensor:
    """Return x with elements below 2^-14 in magnitude set to zero, as if float16 had no subnormal numbers."""
    return torch.where(x.abs() < 2.0**-14, torch.zeros_like(x), x)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor, d: Tensor, sign: int) -> Tensor:
    # float64 represents the product of two float32 numbers exactly.
    return (a.double() * b.double() + sign * (c * d).double()).float()


def sigmoid_by_exp(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu_in_two_roundings(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def square_mean_in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().square().mean(-1, keepdim=True).float()


def mm_in_halves(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[1] // 2
    # The second half first: the sum over the inner dim then has another order.
    return a[:, half:] @ b[half:] + a[:, :half] @ b[:half]


def mm_through(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) @ b.to(dtype)).to(a.dtype)


def mm_rowwise(a: Tensor, b: Tensor) -> Tensor:
    # `cat` refuses an empty list.
    return torch.cat([row.unsqueeze(0) @ b for row in a]) if len(a) else a @ b


def summed_backwards(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x.flip(dims).contiguous().sum(dims, keepdim=keepdim)


def own_rows(x: Tensor, size: int, group: str) -> Tensor:
    """Return this rank's rows of x, without the sum over ranks. x has a block of rows for each of `size` ranks."""
    rows = len(x) // size
    first = group_named(group).rank() * rows
    return x[first : first + rows].clone()


def rolled_blocks(x: Tensor, size: int) -> Tensor:
    return x.roll(len(x) // size, 0)


def first_block_repeated(x: Tensor, size: int) -> Tensor:
    rows = len(x) // size
    return torch.cat([x[:-rows], x[:rows]]) if size > 1 else x


def clipped(x: Tensor, limit: float) -> Tensor:
    # The norm of this rank's shard, not of the whole gradient.
    norm = torch.linalg.vector_norm(x)
    return x * (limit / torch.maximum(norm, torch.full_like(norm, limit)))


def of_step_before(x: Tensor, key: str) -> Tensor:
    """Return the value that x had at the previous step, or x itself at the first step.

    The values are stored under `key`.
    """
    before = NOW.memory.get(key)
    # With its step: a kernel may run several times in a step, as for micro-batches.
    NOW.memory[key] = (NOW.step, x.clone())
    return before[1].clone() if before is not None and before[0] < NOW.step else x


def with_step_before(x: Tensor, key: str) -> Tensor:
    total = NOW.memory[key] + x if key in NOW.memory else x.clone()
    NOW.memory[key] = total.clone()
    return total


def narrowed_to_bytes(x: Tensor) -> Tensor:
    return x.to(torch.uint8).to(x.dtype)


def slept_on_last_rank(x: Tensor) -> Tensor:
    import time

    if NOW.is_last_rank:
        time.sleep(0.02)
    return x
