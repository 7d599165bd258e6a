"""Compute the XXH3-128 of many blocks of 16 KiB (leaves) at once, in torch operators, for devices without xxhash.

Written from the specification (xxHash, doc/xxhash_spec.md, 0.2.0, "large inputs"), for inputs of exactly LEAF_BYTES,
seed 0 and the default secret. A leaf has 16 blocks, a block 16 stripes, and a stripe 8 words of 64 bits. The words at
the same position in all stripes are called a lane, and each lane has an accumulator. All arithmetic is modulo 2**64, in
int64.

Two facts allow parallelism:

- The order in which a block's stripes are added does not matter. So a single reduction reads all bytes of all leaves.
  Only its result, a sixteenth of the words, is processed block after block.
- A lane's word is also added to the accumulator of the neighbouring lane. So lanes are kept as pairs, even and odd.

`mix`, `scramble`, `fold` and `avalanche` contain all of the arithmetic. They use only Python's operators, so they
accept torch's tensors and Triton's blocks: `xxh3_kernel.py` compiles these very functions.
"""

from __future__ import annotations

import functools
import struct

import torch

# L leaves, B blocks a leaf, S stripes a block, P pairs of lanes a stripe
BLOCKS, STRIPES, PAIRS = 16, 16, 4
LEAF_WORDS = BLOCKS * STRIPES * PAIRS * 2
LEAF_BYTES = 8 * LEAF_WORDS
SLAB_LEAVES = 2048
"""The number of leaves that are hashed at a time, 32 MiB, to bound the memory for intermediates."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_INITIAL = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)


def mix(word: torch.Tensor, neighbour: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the number to add to an accumulator of the hash.

    `word` and `neighbour` are the words of a stripe that belong to this and to the neighbouring accumulator. `key` is
    the key for `word`.
    """
    value = word ^ key
    return neighbour + (value & 0xFFFFFFFF) * ((value >> 32) & 0xFFFFFFFF)


def scramble(accumulator: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return an accumulator's value after the end of a block, computed from its earlier value and a key."""
    # `>>` copies the sign bit in int64, so a mask clears the upper bits. The factor is the specification's PRIME32_1, a
    # literal as Triton compiles no global variables.
    return (accumulator ^ ((accumulator >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1


def fold(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply two words, and return the upper half xor the lower half of the 128-bit product."""
    # int64 has no 128-bit product, so it is the sum of products of 32-bit halves.
    left_low, left_high = left & 0xFFFFFFFF, (left >> 32) & 0xFFFFFFFF
    right_low, right_high = right & 0xFFFFFFFF, (right >> 32) & 0xFFFFFFFF
    cross = left_low * right_high + ((left_low * right_low >> 32) & 0xFFFFFFFF)
    middle = left_high * right_low + (cross & 0xFFFFFFFF)
    upper = left_high * right_high + ((cross >> 32) & 0xFFFFFFFF) + ((middle >> 32) & 0xFFFFFFFF)
    return upper ^ (left * right)


def avalanche(x: torch.Tensor) -> torch.Tensor:
    """Mix the bits of a word, so that each bit of the result depends on all bits of the word."""
    x = (x ^ ((x >> 37) & 0x7FFFFFF)) * 0x165667919E3779F9
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def hash_leaves(leaves_LW: torch.Tensor) -> torch.Tensor:
    """Return the XXH3-128 of every leaf (block of 16 KiB), for devices without Triton.

    The argument is int64 [L, LEAF_WORDS]. The result is int64 [L, 2], on the same device, with the upper and the lower
    half of each hash.
    """
    slabs = [_hash_slab(slab, tables(leaves_LW.device)) for slab in leaves_LW.split(SLAB_LEAVES)]
    return torch.cat(slabs)


def _hash_slab(leaves_LW: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    blocks, last, scrambles, upper, lower, start = table.view(-1, PAIRS, 2).split([STRIPES, STRIPES, 1, 1, 1, 1])
    # The last stripe of an input has a key of its own, so the last block has other keys.
    keys_BSP2 = torch.cat([blocks.expand(BLOCKS - 1, -1, -1, -1), last[None]])
    words_LBSP2 = leaves_LW.view(-1, BLOCKS, STRIPES, PAIRS, 2)
    sums_LBP2 = mix(words_LBSP2, words_LBSP2.flip(-1), keys_BSP2).sum(2)
    accumulators_LP2 = start
    for block in range(BLOCKS - 1):
        accumulators_LP2 = scramble(accumulators_LP2 + sums_LBP2[:, block], scrambles)
    # The last block is added, but not scrambled.
    accumulators_LP2 = accumulators_LP2 + sums_LBP2[:, -1]
    ends = []
    for key, length in ((upper, UPPER_LENGTH), (lower, LOWER_LENGTH)):
        left, right = (accumulators_LP2 ^ key).unbind(-1)
        ends.append(avalanche(fold(left, right).sum(1) + length))
    return torch.stack(ends, 1)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFFFFFFFFFF) - ((word & 0x8000000000000000) << 1)


UPPER_LENGTH, LOWER_LENGTH = _signed(~(LEAF_BYTES * _PRIME64_2)), _signed(LEAF_BYTES * _PRIME64_1)


@functools.cache
def tables(device: torch.device) -> torch.Tensor:
    """Return all constants of the hash, as int64 [36, 8].

    The number of rows for each constant, in order:

    - 16: keys for a block's stripes.
    - 16: keys for the last block's stripes.
    - 1: the key for scrambling.
    - 2: the keys for the upper and for the lower half of the result.
    - 1: the initial accumulators.
    """

    def key(offset: int) -> tuple[int, ...]:
        return struct.unpack_from("<8q", _SECRET, offset)

    # The offsets in the secret are those of the specification.
    stripes = [key(8 * stripe) for stripe in range(STRIPES)]
    last = [*stripes[:-1], key(len(_SECRET) - 71)]
    ends = [key(len(_SECRET) - 64), key(len(_SECRET) - 75), key(11)]
    return torch.tensor([*stripes, *last, *ends, tuple(map(_signed, _INITIAL))], dtype=torch.int64, device=device)
