"""List the tensors that differ between two recordings and, if their values are stored, by how many ULPs.

Each tensor's entry counts its differing records, and those whose values are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.capture.selection import name_value
from bitproof.harness.capture.stored import have_same_rows
from bitproof.harness.capture.values import open_values_of
from bitproof.harness.compare.bits import bit_difference, tensor_type, ulp_counts
from bitproof.harness.compare.order import ComputationOrder, ComputedAt
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import BUCKETS, Drift, Key, Record, Recording


def measure_drift(reference: Path, candidate: Path) -> list[Drift]:
    """Return a `Drift` for each tensor (kind and name) that differs at any step on any rank, in the order of
    computation.

    The numbers of ULPs and elements are None if no values are stored. Raises RecordingError if values are damaged.
    """
    folders = (reference, candidate)
    recordings = (read_recording(reference), read_recording(candidate))
    order, entries = ComputationOrder(), dict[tuple[str, str], tuple[ComputedAt, Drift]]()
    for rank in sorted({rank for recording in recordings for rank in recording.ranks}):
        # Columns are compared much faster than records, and most ranks agree.
        if have_same_rows(*recordings, rank):
            continue
        # Only the records of a single rank are in memory at a time.
        left, right = (recording.records_of(rank) for recording in recordings)
        order.add(left)
        differing = [key for key in left if key in right and _identity(left[key]) != _identity(right[key])]
        for key in sorted(differing, key=order):
            place, new = order(key), _new_entry(key, left[key], right[key])
            first, entry = entries.setdefault((key.kind, key.name), (place, new))
            # Ranks are in order, but an earlier rank may have its first difference at a later step.
            if place < first:
                for name in ("step", "rank", "reference_type", "candidate_type"):
                    setattr(entry, name, getattr(new, name))
                entries[key.kind, key.name] = place, entry
            entry.records += 1
        for key, ours, theirs in _stored_pairs(sorted(differing, key=order), folders, recordings):
            _add_values(entries[key.kind, key.name][1], ours, theirs)
    return [entry for _, entry in sorted(entries.values(), key=lambda found: found[0])]


def _identity(record: Record) -> tuple[str, str, tuple[int, ...]]:
    return record.digest, record.dtype, record.shape


def _new_entry(key: Key, reference: Record, candidate: Record) -> Drift:
    return Drift(
        kind=key.kind,
        name=key.name,
        step=key.step,
        rank=key.rank,
        records=0,
        measured=0,
        reference_type=f"{reference.dtype}{list(reference.shape)}",
        candidate_type=f"{candidate.dtype}{list(candidate.shape)}",
        histogram={},
    )


def _stored_pairs(
    keys: Sequence[Key], folders: tuple[Path, Path], recordings: tuple[Recording, Recording]
) -> Iterator[tuple[Key, Tensor, Tensor]]:
    # The values of a pair are stored in both recordings, or cannot be compared.
    if not keys or not all(recording.manifest.values_sha256 for recording in recordings):
        return
    rank = keys[0].rank
    with ExitStack() as files:
        opened = [
            files.enter_context(open_values_of(folder, recording, rank))
            for folder, recording in zip(folders, recordings, strict=True)
        ]
        records = [recording.records_of(rank) for recording in recordings]
        kept = opened[0].names & opened[1].names
        for key in keys:
            if name_value(key) in kept:
                left, right = (values.read_recorded(key, of[key]) for values, of in zip(opened, records, strict=True))
                yield key, left, right


def _add_values(entry: Drift, reference: Tensor, candidate: Tensor) -> None:
    if tensor_type(reference) != tensor_type(candidate):
        return  # elements have no partners
    difference = bit_difference(reference, candidate)
    # Only records with different digests come here.
    if difference.is_equal:
        raise RecordingError(f"{entry.kind} {entry.name} has one value and two digests")
    if not entry.measured:
        entry.reference_bits, entry.candidate_bits = difference.reference_bits, difference.candidate_bits
    entry.measured += 1
    entry.elements = (entry.elements or 0) + difference.elements
    entry.elements_differing = (entry.elements_differing or 0) + difference.elements_differing
    if difference.max_ulp is not None:
        entry.max_ulp = max(entry.max_ulp or 0, difference.max_ulp)
    # The first bucket has the equal elements, which a list of differences leaves out.
    counts = dict(zip(BUCKETS, ulp_counts(reference, candidate).tolist(), strict=True))
    totals = {bucket: entry.histogram.get(bucket, 0) + counts[bucket] for bucket in BUCKETS[1:]}
    entry.histogram = {bucket: count for bucket, count in totals.items() if count}
