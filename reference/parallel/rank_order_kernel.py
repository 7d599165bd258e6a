"""A Triton kernel that sums over ranks in ascending rank order, ((r0 + r1) + r2) + ... It reads each part once.

Every addition rounds to the tensors' dtype, as in torch; 16-bit floats are added in float32. Rounding to bfloat16 is
computed on bits, so that it depends on no compiler and no GPU. It is to nearest, with ties to even, and NaN becomes
0x7fc0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# W ranks of the group; N elements of one rank's part

BLOCK = 1024
_BFLOAT16, _HALF, _OTHER = tl.constexpr(2), tl.constexpr(1), tl.constexpr(0)


def add_parts(parts_WN: torch.Tensor, total_N: torch.Tensor) -> None:
    """Add the ranks' tensors `parts_WN[rank]` in rank order, and write the sum into `total_N`.

    All tensors are contiguous and have the same dtype.
    """
    kind = {torch.bfloat16: 2, torch.float16: 1}.get(parts_WN.dtype, 0)
    stride, num = parts_WN.stride(0), total_N.numel()
    # As bits: the kernel widens and rounds bfloat16 itself.
    if kind == 2:
        parts_WN, total_N = parts_WN.view(torch.int16), total_N.view(torch.int16)
    with torch.cuda.device_of(parts_WN):
        add_in_rank_order[(triton.cdiv(num, BLOCK),)](parts_WN, total_N, stride, num, len(parts_WN), BLOCK, kind)


@triton.jit  # type: ignore[untyped-decorator]
def add_in_rank_order(
    parts: tl.tensor,
    total: tl.tensor,
    stride: tl.int64,
    num_elements: tl.int64,
    num_ranks: tl.int32,
    block: tl.constexpr,
    kind: tl.constexpr,
) -> None:
    """Add a block of all ranks' parts: `block` adjacent elements, at this program's index.

    - `stride`: the number of elements between the beginnings of two parts.
    - `kind`: 2 for bfloat16 (passed as int16), 1 for float16, otherwise 0.
    """
    # In 64 bits, as a tensor may have more than 2^31 elements.
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = places < num_elements
    found = tl.load(parts + places, mask)
    if kind == _BFLOAT16:
        found = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    for rank in range(1, num_ranks):
        part = tl.load(parts + rank * stride + places, mask)
        if kind == _BFLOAT16:
            found += (part.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            bits = found.to(tl.int32, bitcast=True)
            # Round to nearest, ties to even: half a unit of the last kept bit, minus 1, plus that bit. NaN is the only
            # number that does not equal itself; its bits would overflow.
            bits = tl.where(found == found, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
            found = (bits & -65536).to(tl.float32, bitcast=True)
        elif kind == _HALF:
            found = (found.to(tl.float32) + part.to(tl.float32)).to(tl.float16)
        else:
            found += part
    if kind == _BFLOAT16:
        tl.store(total + places, (found.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask)
    else:
        tl.store(total + places, found, mask)
