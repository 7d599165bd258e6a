"""Find the part of each tensor that each rank has, and whether two systems divide tensors among ranks differently.

For example, rows 0:4 and 4:8 on two ranks of the reference, and rows 0:2, 2:4, 4:6, 6:8 on four of the candidate, are
two layouts. Recordings are read rank by rank; only the layouts stay in memory, and a layout that does not change from
step to step is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bitproof.harness.case import Case, Kind
from bitproof.harness.records import Record, Recording


class LogicalTensor(NamedTuple):
    """A whole tensor at a step. Ranks may have recorded the tensor whole or in parts."""

    step: int
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} {self.name}"


Parts = Mapping[int, Record]
"""A tensor's records, by rank; ranks without a part of it are absent."""


class PartLayout(NamedTuple):
    """The layout of a rank's part of a tensor, from its record: index range (`box`), placements and shape."""

    box: str | None
    placements: str | None
    shape: tuple[int, ...]


PartLayouts = Mapping[int, PartLayout]
"""A tensor's part layouts, by rank; ranks without a part of it are absent."""


def have_different_layouts(case: Case, reference: Recording, candidate: Recording) -> bool:
    """Whether some tensor has different layouts in the two systems, or the case says that their meshes differ."""
    if case.reference_parallelism is not None:
        return True
    if reference.manifest.world_size == candidate.manifest.world_size:
        # A quick check of whole columns, before the layouts of all tensors are collected.
        from bitproof.harness.capture.stored import have_same_layout  # loads pyarrow

        if all(have_same_layout(reference, candidate, rank) for rank in sorted({*reference.ranks, *candidate.ranks})):
            return False
    return any(True for _ in tensors_across(reference, candidate))


def tensors_across(
    reference: Recording, candidate: Recording
) -> Iterator[tuple[LogicalTensor, tuple[PartLayouts, PartLayouts]]]:
    """Yield each tensor that the two systems divide differently among ranks, with a pair of its layouts.

    The pair has the tensor's layout in the reference and in the candidate, each as rank -> layout of the rank's part.
    If the systems have different numbers of ranks, every tensor is yielded. The order is by step, then as in the
    reference.
    """
    have_as_many = reference.manifest.world_size == candidate.manifest.world_size
    here, there = part_layouts_of(reference), part_layouts_of(candidate)
    sides = {name: (here.get(name, {}), there.get(name, {})) for name in {**here, **there}}
    if have_as_many:
        # Equal layouts pair rank by rank. A tensor that one system lacks is a missing record.
        sides = {name: pair for name, pair in sides.items() if pair[0] and pair[1] and pair[0] != pair[1]}
    for step in sorted({step for pair in sides.values() for side in pair for steps in side.values() for step in steps}):
        for name, pair in sides.items():
            left, right = ({rank: steps[step] for rank, steps in side.items() if step in steps} for side in pair)
            if (left or right) and layouts_differ(left, right, have_as_many):
                yield LogicalTensor(step, *name), (left, right)


def layouts_differ(here: Parts | PartLayouts, there: Parts | PartLayouts, have_as_many: bool) -> bool:
    """Whether a tensor's layouts differ between two systems, so that its records cannot be compared rank by rank.

    - True if the systems have different numbers of ranks (`have_as_many` is False).
    - Otherwise False if one of the systems does not have the tensor.
    - A rank's layouts are not compared if its part has no elements in one of the systems. For example, FSDP2's gradient
      of a sharded parameter may be None on a rank. The rank's records are compared as usual, and differ.
    """
    if not have_as_many:
        return True
    if not here or not there:
        return False
    # The sets of ranks must be equal, and each rank's index range, if it has elements in both systems.
    return here.keys() != there.keys() or any(
        _range_of(part) != _range_of(there[rank])
        for rank, part in here.items()
        if has_part(part) and has_part(there[rank])
    )


def has_part(part: Record | PartLayout) -> bool:
    """Whether the record of a tensor on a rank says that the rank has a part of the tensor.

    - False for a plain tensor without elements.
    - True for a DTensor, even if the rank's shard is empty: such a shard still has a position in the tensor.
    """
    return bool(part.box or part.placements) or 0 not in part.shape


def _range_of(part: Record | PartLayout) -> tuple[str | None, bool]:
    return part.box, part.placements is None


def part_layouts_of(recording: Recording) -> dict[tuple[Kind, str], dict[int, dict[int, PartLayout]]]:
    """Return (kind, name) -> rank -> step -> layout of the rank's part. Ranks with equal layouts share a dict."""
    # The result is cached on the recording, unless its records are in memory, as these may still change.
    is_stored = not recording.holds_records
    if is_stored and (known := vars(recording).get("part_layouts")) is not None:
        return known
    found: dict[tuple[Kind, str], dict[int, dict[int, PartLayout]]] = {}
    same: dict[tuple[tuple[int, PartLayout], ...], dict[int, PartLayout]] = {}
    for rank in recording.ranks:
        own: dict[tuple[Kind, str], dict[int, PartLayout]] = {}
        for key, record in recording.records_of(rank).items():
            layout = PartLayout(record.box, record.placements, record.shape)
            own.setdefault((key.kind, key.name), {})[key.step] = layout
        for name, steps in own.items():
            # Ranks with the same layout share a dictionary: a thousand ranks need the memory of a few.
            found.setdefault(name, {})[rank] = same.setdefault((*steps.items(),), steps)
    if is_stored:
        vars(recording)["part_layouts"] = found
    return found
