"""Measure how close two recordings are in value, for CLOSE cases and for DIFFERENT cases that state a bound.

The stored values of every tensor are read rank by rank, and checked against the recorded digests.

- A tensor's relative error is |r - c| / |r|, with Euclidean norms over all elements in float64. Example: r = [3, 4] and
  c = [3, 5] have the error 1 / 5.
- Squares are added in sequence in row-major order.
- An element that is NaN in both tensors, or the same infinity in both, adds nothing.
- If an element is NaN or infinite in only one of the tensors, the error is infinite. So it is if the reference is all
  zeros and the candidate is not.
- The error of tensors that are not floating point is 0 if they agree in bits, and otherwise infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bitproof.harness.capture.recording_files import checked_values_path, read_recording
from bitproof.harness.capture.selection import name_value
from bitproof.harness.capture.values import Values, open_values
from bitproof.harness.compare.bits import bits_equal, is_unlike, name_counts, tensor_type, ulp_counts
from bitproof.harness.compare.order import computation_order
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Closeness, Key, Recording


def measure(reference: Path, candidate: Path, bound: float, step: int | None = None) -> Closeness:
    """Measure the relative errors of all tensors at `step` (None: at all steps), and count the errors beyond `bound`.

    `reference` and `candidate` are the folders of two recordings with values. Raises RecordingError if a tensor other
    than a buffer is in only one recording.
    """
    folders = {"reference": reference, "candidate": candidate}
    recordings = {side: read_recording(folder) for side, folder in folders.items()}
    here, there = (recording.records for recording in recordings.values())
    keys = [key for key in here if key in there]
    if not keys or any(key.kind != "buffer" for key in here.keys() ^ there):  # only a buffer may be missing on a side
        raise RecordingError("two recordings without the same tensors have no values to compare")
    measured = [key for key in keys if step is None or key.step == step]
    if not measured:
        raise RecordingError(f"two recordings have no values of step {step} to compare")
    errors: dict[Key, float] = {}
    counts: dict[str, Tensor] = {}
    # Rank by rank, so that the files of a single rank are open at a time.
    for rank in sorted({key.rank for key in measured}):
        with ExitStack() as files:
            opened = [files.enter_context(_checked_values(folders[side], recordings[side], rank)) for side in folders]
            for key in (key for key in measured if key.rank == rank):
                left, right = (
                    values.read_recorded(key, recording.records[key])
                    for values, recording in zip(opened, recordings.values(), strict=True)
                )
                _refuse_unlike(key, left, right)
                errors[key] = relative_error(left, right)
                counts[key.kind] = counts.get(key.kind, 0) + ulp_counts(left, right)
    order = computation_order(keys)
    # Among equal errors, the tensor that is computed first is reported.
    largest = min(errors, key=lambda key: (-errors[key], order(key)))
    # `not <=` and not `>`: it is also true if an error were NaN.
    beyond = sorted((key for key, error in errors.items() if not error <= bound), key=order)
    return Closeness(
        bound=bound,
        largest_error=_finite(errors[largest]),
        largest=largest,
        tensors_beyond=len(beyond),
        histogram={kind: name_counts(row) for kind, row in counts.items()},
        first_beyond=beyond[0] if beyond else None,
        first_beyond_error=_finite(errors[beyond[0]]) if beyond else None,
    )


def _refuse_unlike(key: Key, left: Tensor, right: Tensor) -> None:
    # Shards may have different shapes; then elements have no partners.
    if left.shape != right.shape:
        raise RecordingError(
            f"step {key.step}, rank {key.rank}, {key.kind} {key.name} is of two sizes: a bound says nothing of it",
            expected=tensor_type(left),
            found=tensor_type(right),
            fix="have both systems show whole tensors, as by DTensor.full_tensor()",
        )


def relative_error(reference: Tensor, candidate: Tensor) -> float:
    """Return the relative error |r - c| / |r|, with the exceptions that this module's docstring lists; it may be
    infinite.
    """
    if bits_equal(reference, candidate):
        return 0.0
    if not reference.is_floating_point() or tensor_type(reference) != tensor_type(candidate):
        return math.inf
    # float64 has every value of the smaller dtypes. On the CPU, so that an error does not depend on the device.
    left, right = (x.detach().cpu().reshape(-1).to(torch.float64) for x in (reference, candidate))
    if is_unlike(left, right).any():
        return math.inf
    # What is not finite agrees in both tensors, and adds nothing.
    finite = left.isfinite()
    left, right = left[finite], right[finite]
    distance, norm = _norm_of(left - right), _norm_of(left)
    return 0.0 if distance == 0 else distance / norm if norm else math.inf


@contextmanager
def _checked_values(folder: Path, recording: Recording, rank: int) -> Iterator[Values]:
    path = checked_values_path(folder, recording.manifest, rank)
    names = {name_value(key) for key in recording.records if key.rank == rank}
    with open_values(path) as values:
        if odd := sorted(names ^ values.names):
            raise RecordingError(
                f"{path} does not hold the tensors that were recorded",
                expected=f"{len(names)} tensors",
                found=f"{len(values.names)}; {odd[0]} is {'missing' if odd[0] in names else 'extra'}",
                fix="record the system again",
            )
        yield values


def _norm_of(x: Tensor) -> float:
    # Divided by the largest magnitude, no square over- or underflows.
    largest = float(x.abs().max()) if x.numel() else 0.0
    # `cumsum` adds in sequence; `sum` would add in blocks that depend on the processor.
    return 0.0 if largest == 0 else largest * math.sqrt(float((x / largest).square().cumsum(0)[-1]))


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
