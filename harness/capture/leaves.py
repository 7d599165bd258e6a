"""Hash the leaves of a tensor (its blocks of 16 KiB) on its own device.

This is done by a Triton kernel or, if that does not work on the device, by slower operators of torch. Before first use,
the kernel and the operators must each hash three known leaves as xxhash does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy
import torch
import xxhash

from bitproof.harness.capture import xxh3
from bitproof.harness.errors import MachineError

logger = logging.getLogger(__name__)

LeafHasher = Callable[[torch.Tensor], torch.Tensor]
NUM_KNOWN = 3


def hash_on_device(octets: torch.Tensor) -> memoryview:
    """Return the XXH3-128 digests of a tensor's blocks of 16 KiB, in order, and of the remaining bytes.

    Each digest has 16 bytes, big-endian as in xxhash. `octets` is uint8 [bytes], contiguous, on any device.
    """
    num_leaves = len(octets) // xxh3.LEAF_BYTES
    whole, rest = octets.tensor_split([num_leaves * xxh3.LEAF_BYTES])
    if whole.data_ptr() % 16 or whole.storage_offset() % 16:  # words are read two at a time, so they must be aligned
        whole = whole.clone()
    digests_L2 = leaf_hasher(octets.device)(whole.view(torch.int64).view(num_leaves, xxh3.LEAF_WORDS))
    fetched = _fetch(torch.cat([digests_L2.view(torch.uint8).flatten(), rest]))
    leaves, rest_bytes = fetched[: 16 * num_leaves], fetched[16 * num_leaves :]
    # The device computes little-endian words; xxhash writes big-endian digests.
    leaves.view("<i8").byteswap(inplace=True)
    if not len(rest_bytes):
        return leaves.data
    return numpy.concatenate([leaves, numpy.frombuffer(xxhash.xxh3_128_digest(rest_bytes.data), numpy.uint8)]).data


def _fetch(octets: torch.Tensor) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    # Without pinned memory the driver would copy twice.
    fetched = torch.empty_like(octets, device="cpu", pin_memory=octets.device.type == "cuda")
    fetched.copy_(octets)  # blocks until the copy is complete
    found: numpy.ndarray[Any, numpy.dtype[numpy.uint8]] = fetched.numpy()
    return found


@functools.cache
def leaf_hasher(device: torch.device) -> LeafHasher:
    """Return the function that hashes leaves on a device: Triton's kernel if it works there, otherwise torch's
    operators.

    Raises MachineError if both fail.
    """
    problems = []
    for name, load in (("Triton's kernel", load_kernel), ("torch's operators", load_operators)):
        try:
            hasher = load()
            if not hashes_known_leaves(hasher, device):
                raise ValueError("a known leaf came out wrong")
        except Exception as error:  # no Triton, no compiler for it, or wrong numbers
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if problems:
            logger.warning("digests on %s are computed by %s, for lack of %s", device, name, problems[0])
        return hasher
    raise MachineError(f"no digest can be computed on {device}", found="; ".join(problems))


def hashes_known_leaves(hasher: LeafHasher, device: torch.device) -> bool:
    # With a single leaf, wrong offsets would go unnoticed.
    words = torch.arange(NUM_KNOWN * xxh3.LEAF_WORDS).mul_(0x165667919E3779F9).roll(1)
    leaves = words.view(NUM_KNOWN, xxh3.LEAF_WORDS)
    expected = b"".join(xxhash.xxh3_128_digest(leaf.numpy().tobytes()) for leaf in leaves)
    return hasher(leaves.to(device)).cpu().numpy().byteswap().tobytes() == expected


def load_kernel() -> LeafHasher:
    from bitproof.harness.capture.xxh3_kernel import hash_leaves

    return hash_leaves


def load_operators() -> LeafHasher:
    return xxh3.hash_leaves
