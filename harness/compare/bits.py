"""Describe how two tensors differ, in bits: which elements, by how many ULPs, and the bits of the first that differ.

Only bytes are compared, never values: -0.0 differs from 0.0, and a NaN equals a NaN of the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitproof.harness.errors import RecordingError
from bitproof.harness.records import BUCKETS

if TYPE_CHECKING:
    from torch import Tensor

ULP_DTYPES = ("float16", "bfloat16", "float32", "float64")
NUM_SAMPLES = 8
SLICE = 1 << 22
"""The number of elements that are compared at a time."""

# The last distance of each bucket: 0, 1, 2, 4, ... 2**62. A bucket for larger distances and one
# for unlike elements follow.
_BUCKET_ENDS = (0, *(2**power for power in range(63)))


@dataclass(frozen=True, kw_only=True)
class BitDifference:
    """How two tensors of the same dtype and shape differ, bit for bit.

    - `histogram`: the number of elements by distance (`records.BUCKETS`).
    - `max_ulp`: the largest distance. `histogram` and `max_ulp` are None for a dtype without ULPs.
    - `first_index`, `reference_bits`, `candidate_bits`: the first differing element; None if no element differs.
    - `samples`: the first few differing elements, each as its index, its bits in the reference, and its bits in the
      candidate.
    """

    elements: int
    elements_differing: int
    max_ulp: int | None = None
    first_index: tuple[int, ...] | None = None
    reference_bits: str | None = None
    candidate_bits: str | None = None
    histogram: dict[str, int] | None = None
    samples: tuple[tuple[tuple[int, ...], str, str], ...] = ()

    @property
    def is_equal(self) -> bool:
        return self.elements_differing == 0


@dataclass(frozen=True, kw_only=True)
class ComparedBits:
    """The difference between two values, and the digests of the two values. The difference is None if dtypes or shapes
    differ.
    """

    difference: BitDifference | None
    digests: tuple[str, str]


def bits_equal(reference: Tensor, candidate: Tensor) -> bool:
    """Whether two tensors agree in dtype, in shape and in every bit. Their strides and devices may differ."""
    import torch

    if tensor_type(reference) != tensor_type(candidate):
        return False
    # As bytes: for `torch.equal`, -0.0 equals 0.0, and a NaN does not equal itself.
    return all(torch.equal(left, right) for _, left, right in _slices(reference, candidate))


def bit_difference(reference: Tensor, candidate: Tensor) -> BitDifference:
    """Compare two tensors bit for bit, a slice at a time.

    Elements are compared in row-major order, on the reference's device. Raises RecordingError if dtype or shape differ.
    """
    import torch

    if tensor_type(reference) != tensor_type(candidate):
        raise RecordingError(
            "tensors of different dtype or shape have no bits to compare",
            expected=tensor_type(reference),
            found=tensor_type(candidate),
        )
    num_differing, max_ulp = 0, max_ulp_distance(reference, candidate)
    samples: list[tuple[tuple[int, ...], str, str]] = []
    for start, left, right in _slices(reference, candidate):
        # Bytes are compared, so that -0.0 differs from 0.0, and a NaN equals itself.
        differs = (left != right).any(dim=1)
        num_differing += int(differs.sum())
        # `start` is the slice's first element, and `place` counts within the slice.
        for place in differs.nonzero()[: NUM_SAMPLES - len(samples), 0].tolist():
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(start + place), reference.shape))
            samples.append((index, _hex(left[place]), _hex(right[place])))
    first_index, reference_bits, candidate_bits = samples[0] if samples else (None, None, None)
    return BitDifference(
        elements=reference.numel(),
        elements_differing=num_differing,
        max_ulp=max_ulp,
        first_index=first_index,
        reference_bits=reference_bits,
        candidate_bits=candidate_bits,
        histogram=None if max_ulp is None else name_counts(ulp_counts(reference, candidate)),
        samples=tuple(samples),
    )


def max_ulp_distance(reference: Tensor, candidate: Tensor) -> int | None:
    """Return the largest distance between corresponding elements in ULPs; None for a dtype that is not in ULP_DTYPES.

    A distance is the number of steps in IEEE 754's totalOrder, -NaN < -inf < ... < inf < NaN. Example: -0.0 and 0.0
    have the distance 1.
    """
    import torch

    if not _has_ulps(reference):
        return None
    largest = 0
    for _, left, right in _typed_slices(reference, candidate):
        # torch has no maximum of unsigned int64s: with a flipped sign bit, the distances sort as unsigned numbers.
        largest = max(largest, int((ulp_distances(left, right) ^ torch.iinfo(torch.int64).min).max()) + 2**63)
    return largest


def ulp_distances(reference: Tensor, candidate: Tensor) -> Tensor:
    """Return the distance between corresponding elements in ULPs, as defined by `max_ulp_distance`.

    The dtype must be in ULP_DTYPES. Distances are int64 modulo 2^64, so a distance of 2^63 or more looks negative. Only
    float64s can have such a distance.
    """
    import torch

    left, right = _ordered(reference), _ordered(candidate)
    return torch.maximum(left, right) - torch.minimum(left, right)


def ulp_counts(reference: Tensor, candidate: Tensor) -> Tensor:
    """Count elements by their distance in ULPs: int64 [buckets] on the CPU, with a count for each bucket of `BUCKETS`.

    For a dtype without ULPs, equal elements are in bucket "0", and all others in the last bucket, "unlike".
    """
    import torch

    counts = torch.zeros(len(BUCKETS), dtype=torch.int64)
    if bits_equal(reference, candidate):
        counts[0] = reference.numel()
        return counts
    for _, left, right in _typed_slices(reference, candidate):
        if _has_ulps(left):
            # A distance between a number and a NaN would mean nothing, so such elements have a bucket of their own.
            distances, unlike = ulp_distances(left, right), is_unlike(left, right)
            index = torch.bucketize(distances, torch.tensor(_BUCKET_ENDS, device=left.device))
            index[distances < 0] = len(BUCKETS) - 2  # 2^63 and more wrapped around: float64s of opposite signs
        else:
            unlike = left != right
            index = torch.zeros_like(unlike, dtype=torch.int64)
        index[unlike] = len(BUCKETS) - 1
        counts += torch.bincount(index.cpu(), minlength=len(BUCKETS))
    return counts


def name_counts(counts: Tensor) -> dict[str, int]:
    """Convert the result of `ulp_counts` to a dict: bucket name -> count, in the order of buckets, without empty
    buckets.
    """
    return {name: count for name, count in zip(BUCKETS, counts.tolist(), strict=True) if count}


def is_unlike(reference: Tensor, candidate: Tensor) -> Tensor:
    """Return a mask of the elements that differ, if either value is not finite. Two NaNs count as equal.

    For example, NaN and 1.0, or inf and -inf.
    """
    special = ~(reference.isfinite() & candidate.isfinite())
    return special & ~(reference.isnan() & candidate.isnan()) & (reference != candidate)


def tensor_type(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape as text: `float32[4, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _has_ulps(tensor: Tensor) -> bool:
    return str(tensor.dtype).removeprefix("torch.") in ULP_DTYPES


def _ordered(tensor: Tensor) -> Tensor:
    import torch

    # An integer of the same size shows the sign as the highest bit, and the other bits grow with the magnitude.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(integer)
    magnitude = torch.iinfo(integer).max
    # So the order of negative floats is reversed, and all their bits but the sign are flipped.
    return torch.where(bits < 0, bits ^ magnitude, bits).to(torch.int64)


def _slices(reference: Tensor, candidate: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield both tensors as bytes, in slices of at most SLICE elements.

    Each result has three parts: the index of the slice's first element, the reference's slice, and the candidate's
    slice. Slices are uint8 of shape [elements, bytes per element], on the reference's device.
    """
    from bitproof.harness.capture.digest import octets

    size, rows = reference.element_size(), (octets(reference.detach()), octets(candidate.detach()))
    # In slices, so that no tensor is copied from a GPU as a whole, and masks stay small.
    for start in range(0, reference.numel(), SLICE):
        left, right = (row[start * size : (start + SLICE) * size].view(-1, size) for row in rows)
        yield start, left, right.to(left.device)


def _typed_slices(reference: Tensor, candidate: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield slices as `_slices` does, but with the tensors' dtype and the shape [elements]."""
    for start, left, right in _slices(reference, candidate):
        yield start, left.view(reference.dtype)[:, 0], right.view(reference.dtype)[:, 0]


def _hex(element: Tensor) -> str:
    # The bytes are in little-endian order.
    return "0x" + bytes(reversed(element.tolist())).hex()
