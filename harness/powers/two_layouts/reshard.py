"""Converts a recording to another layout of tensors, to compare two systems that divide tensors differently.

A cell is a part of a tensor that no rank of either system divides. For example, the reference has rows 0:4 and 4:8 on
two ranks, and the candidate has rows 0:2, 2:4, 4:6 and 6:8 on four. Then the cells are 0:2, 2:4, 4:6 and 6:8.

1. A first run of each system records which part of each tensor a rank has. The boundaries of all parts define the
   cells.
2. A second run of each system records a digest for each cell.
3. The reference's records are converted to the candidate's layout with these digests, and compared as usual.

No tensor is gathered, so no process loads more than a rank's own part. A plain tensor, which is not a DTensor, counts
as whole. A tensor that is whole on several ranks of the reference must be equal on all of them. If both systems have
equally many ranks with the same parts, records are paired rank by rank, and plain tensors may differ between ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bitproof.harness.case import Case
from bitproof.harness.compare.part_layouts import (
    LogicalTensor,
    PartLayout,
    PartLayouts,
    layouts_differ,
    part_layouts_of,
    tensors_across,
)
from bitproof.harness.records import Key, Manifest, Record, Recording
from bitproof.harness.records.layout import DIGEST_DIGITS, Box, Cell, Cuts, alike, joint_cuts, name_cell

NUM_NAMED = 5


@dataclass(frozen=True)
class Resharded:
    """The reference's recording in the candidate's layout of tensors, and the problems of the conversion.

    - `across`: tensors that are compared cell by cell.
    - `unusable`: a sentence for each cell or layout that is unknown.
    - `unequal_replicas`: tensors with a part that several ranks of a system have, but with different bits.
    - `remarks`: sentences about the tensors in `unequal_replicas`.
    """

    recording: Recording
    across: frozenset[LogicalTensor]
    unusable: tuple[str, ...]
    remarks: tuple[str, ...]
    unequal_replicas: frozenset[LogicalTensor]


def differ_only_by_missing_parts(case: Case, reference: Recording, candidate: Recording) -> bool:
    """Whether the two systems' layouts differ only because some ranks lack a gradient or an optimizer state.

    If so, calls can still be matched rank by rank. For example, a rank leaves a parameter out of its update.
    """
    across = [] if case.reference_parallelism is not None else [*tensors_across(reference, candidate)]
    return bool(across) and all(_is_part_lacking(tensor, *sides) for tensor, sides in across)


def _is_part_lacking(tensor: LogicalTensor, here: PartLayouts, there: PartLayouts) -> bool:
    """Whether a tensor's layouts in the two systems differ only because some ranks of a system lack the tensor.

    `here` and `there` map ranks to the tensor's layouts in the two systems. Always False unless the tensor is a
    gradient or an optimizer state.
    """
    both = here.keys() & there
    left, right = ({rank: side[rank] for rank in both} for side in (here, there))
    return tensor.kind in ("grad", "optimizer") and not layouts_differ(left, right, have_as_many=True)


def common_cuts(reference: Recording, candidate: Recording) -> dict[str, Cuts]:
    """Return `kind/name` -> the indices at which parts begin or end, for each tensor whose layouts differ.

    A tensor whose overall shape differs between the two systems is left out.
    """
    boxes: dict[str, set[Box]] = {}
    for tensor, sides in tensors_across(reference, candidate):
        parts = [_box_of(held) for side in sides for held in {*side.values()}]
        boxes.setdefault(f"{tensor.kind}/{tensor.name}", set()).update(box for box in parts if box is not None)
    return {name: joint_cuts(same) for name, found in boxes.items() if (same := alike(found))}


def resharded(reference: Recording, candidate: Recording, cuts: Mapping[str, Cuts]) -> Resharded:
    """Convert the reference's recording to the candidate's layout.

    Both recordings must have the digests of the cells into which `cuts` divide each tensor.
    """
    across = [tensor for tensor, _ in tensors_across(reference, candidate)]
    # All digests of cells are collected first, since a rank's part in one layout may be spread over ranks of the other.
    known = {tensor: _Cells(tensor, cuts.get(f"{tensor.kind}/{tensor.name}")) for tensor in across}
    for number, side in enumerate((reference, candidate)):
        for rank in side.ranks:
            for key, record in side.records_of(rank).items():
                if (cells := known.get(LogicalTensor(*key[:3]))) is not None:
                    cells.add(number, rank, record)
    unusable = [why for cells in known.values() for why in cells.unusable]
    apart = {tensor: lines for tensor, cells in known.items() if (lines := [*cells.remarks()])}
    # The case states the layout, so it becomes the candidate's; all else that the manifest states is unchanged.
    manifest = replace(reference.manifest, case=candidate.manifest.case, world_size=candidate.manifest.world_size)
    return Resharded(
        _ReshardedRecording(manifest, reference, candidate, known),
        frozenset(across),
        tuple(unusable),
        tuple(dict.fromkeys(each for lines in apart.values() for each in lines)),
        frozenset(apart),
    )


class _ReshardedRecording(Recording):
    """The reference's records in the candidate's layout, converted rank by rank."""

    def __init__(
        self, manifest: Manifest, reference: Recording, candidate: Recording, known: Mapping[LogicalTensor, _Cells]
    ) -> None:
        self.manifest = manifest
        self._reference, self._candidate, self._known = reference, candidate, known

    @property
    def holds_records(self) -> bool:
        return "records" in self.__dict__

    @property
    def ranks(self) -> Sequence[int]:
        return sorted({*self._reference.ranks, *self._candidate.ranks})

    @cached_property
    def records(self) -> dict[Key, Record]:  # type: ignore[override]
        return {key: record for rank in self.ranks for key, record in self.records_of(rank).items()}

    def records_of(self, rank: int) -> dict[Key, Record]:
        """Return the reference's records of a rank, as if the reference had the candidate's layout.

        For a tensor with another layout, this is the candidate's record, with its digest changed if bits differ. All
        other records are the reference's, unchanged.
        """
        # In the candidate's order. A record that only the candidate has is left out, and shows as extra.
        own, found = self._reference.records_of(rank), dict[Key, Record]()
        for key, record in self._candidate.records_of(rank).items():
            cells = self._known.get(LogicalTensor(*key[:3]))
            other = own.get(key) if cells is None or not cells.are_on_both else cells.as_in(rank, record)
            if other is not None:
                found[key] = other
        # Records that only the reference has stay unchanged: the comparison reports them as missing.
        for key, record in own.items():
            cells = self._known.get(LogicalTensor(*key[:3]))
            if cells is None or not cells.are_on_both:
                found.setdefault(key, record)
        # Cells without a rank in the candidate have to show as gaps, on some rank: on rank 0.
        for tensor, cells in self._known.items() if rank == 0 else ():
            for cell in cells.left:
                found[Key(*tensor[:2], f"{tensor.name}{name_cell(cell)}", 0)] = cells.first
        return found


def replicas(recording: Recording) -> Iterator[LogicalTensor]:
    """Yield each DTensor whose replicas differ: several ranks have the same part, with different digests."""
    # Digests are only read for parts that several ranks have.
    shared: set[tuple[str, str, str]] = set()
    for (kind, name), ranks in part_layouts_of(recording).items():
        boxes = [held.box for steps in ranks.values() for held in {*steps.values()} if held.box is not None]
        shared |= {(kind, name, box) for box in {*boxes} if boxes.count(box) > 1}
    found: dict[LogicalTensor, dict[str, set[str]]] = {}
    for rank in recording.ranks if shared else ():
        for key, record in recording.records_of(rank).items():
            if record.box is not None and (key.kind, key.name, record.box) in shared:
                parts = found.setdefault(LogicalTensor(*key[:3]), {})
                parts.setdefault(record.box, set()).add(record.digest)
    for tensor in sorted(found):
        if any(len(digests) > 1 for digests in found[tensor].values()):
            yield tensor


@dataclass
class _Cells:
    """A tensor's cells, which are parts that no rank divides. In pairs, the reference is first.

    - `first`: the reference's record of the tensor on the first rank that has one.
    - `digests`: for each system, cell -> digest, or a set of digests if ranks differ. Empty if the layout is unknown.
    - `has`: for each system, the number of ranks that have a part.
    - `placed`: for each system, the number of ranks whose part is of a DTensor.
    """

    tensor: LogicalTensor
    cuts: Cuts | None
    digests: tuple[dict[Cell, set[str] | str], dict[Cell, set[str] | str]] = field(default_factory=lambda: ({}, {}))
    unusable: list[str] = field(default_factory=list)
    has: list[int] = field(default_factory=lambda: [0, 0])
    placed: list[int] = field(default_factory=lambda: [0, 0])
    first: Record = field(init=False)

    @property
    def are_on_both(self) -> bool:
        return all(self.has)

    @property
    def left(self) -> list[Cell]:
        """The reference's cells that no rank of the candidate has; empty if a system does not have the tensor at
        all.
        """
        return sorted(self.digests[0].keys() - self.digests[1].keys()) if self.are_on_both else []

    def add(self, side: int, rank: int, record: Record) -> None:
        if side == 0 and not self.has[0]:
            self.first = record
        self.has[side] += 1
        self.placed[side] += bool(record.placements)
        unknown = f"which parts ranks hold is not known of {self.tensor}"
        # Once per tensor, and before all other sentences.
        if record.box is None and record.placements and unknown not in self.unusable[:1]:
            self.unusable.insert(0, unknown)
        if self.cuts is None:
            return
        if (own := _cells_of(record, self.cuts)) is None:
            role = ("reference", "candidate")[side]
            self.unusable.append(f"the {role} has no digests of cells of {self.tensor} on rank {rank}")
            return
        # A string if all ranks so far agree, which is the usual case, and a set if they differ.
        known = self.digests[side]
        for cell, digest in own.items():
            if (before := known.setdefault(cell, digest)) != digest:
                known[cell] = {digest} | (before if isinstance(before, set) else {before})

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each system in which ranks have the same cell with different bits."""
        for side, role in enumerate(("reference", "candidate")):
            if any(isinstance(digests, set) for digests in self.digests[side].values()):
                is_placed = self.placed[side] == self.has[side]
                what = "replicas" if is_placed else "plain tensors, which count as whole on each rank,"
                yield f"{what} of one tensor differ within the {role}: {self.tensor}"

    def as_in(self, rank: int, record: Record) -> Record | None:
        """Convert the reference's record of the tensor to the layout of `record`, the candidate's record on this rank.

        Returns `record`, with its digest changed if bits differ; None if the reference lacks a piece of this part.
        """
        first = self.first
        # Such tensors cannot be equal: a placeholder for the digest makes the pair differ.
        if self.cuts is None or first.dtype != record.dtype:
            return record._replace(digest=_other_digest(record.digest), dtype=first.dtype, shape=first.shape)
        here, own = self.digests[0], _cells_of(record, self.cuts) or {}
        # No cells at all: the part's layout is unknown, unless it is empty.
        if any(cell not in here for cell in own) or (not own and 0 not in record.shape):
            return None
        differs = any(here[cell] != digest for cell, digest in own.items())
        return record._replace(digest=_other_digest(record.digest), value=first.value) if differs else record


def _cells_of(record: Record, cuts: Cuts) -> dict[Cell, str] | None:
    # A plain tensor counts as whole; a DTensor without a recorded index range is unknown.
    cells = _cells_in(record.box, record.shape if record.box is None and not record.placements else None, cuts)
    text = record.cells
    if cells is None or text is None or len(text) != DIGEST_DIGITS * len(cells):
        return None
    # The record has the digests of all cells as one string, in the order of the cells.
    return {cell: text[DIGEST_DIGITS * at :][:DIGEST_DIGITS] for at, cell in enumerate(cells)}


@functools.lru_cache(maxsize=1 << 16)
def _cells_in(box: str | None, shape: tuple[int, ...] | None, cuts: Cuts) -> list[Cell] | None:
    """Return the cells into which `cuts` divide a rank's part of a tensor.

    Return None if the cuts do not fit, or if the part is unknown. `box` is the part as text; it is None for a whole
    tensor of shape `shape`.
    """
    # All steps and many ranks have the same parts, hence the cache.
    known = Box.parse(box) if box is not None else Box.whole(shape) if shape is not None else None
    cut = known.cut_by(cuts) if known is not None else None
    return None if cut is None else cut.cells(cuts)


def by_rank(recording: Recording) -> dict[LogicalTensor, dict[int, Record]]:
    found: dict[LogicalTensor, dict[int, Record]] = {}
    for key, record in recording.records.items():
        found.setdefault(LogicalTensor(key.step, key.kind, key.name), {})[key.rank] = record
    return found


def tensors_of(recording: Recording) -> list[LogicalTensor]:
    """Return each tensor that any rank has recorded, once for each step at which it was recorded."""
    held = part_layouts_of(recording).items()
    steps = {name: sorted({step for own in ranks.values() for step in own}) for name, ranks in held}
    return [LogicalTensor(step, *name) for name, all_steps in steps.items() for step in all_steps]


def are_staged(*recordings: Recording) -> bool:
    """Whether each parameter is a plain tensor on a single rank, as in a pipeline; False without parameters."""
    for recording in recordings:
        parameters = [ranks for (kind, _), ranks in part_layouts_of(recording).items() if kind == "param"]
        held = [{*steps.values()} for ranks in parameters for steps in ranks.values()]
        at = [[step for steps in ranks.values() for step in steps] for ranks in parameters]
        # A step that occurs twice is that of a parameter on two ranks.
        if not parameters or any(len(steps) != len({*steps}) for steps in at):
            return False
        if any(part.placements is not None for parts in held for part in parts):
            return False
    return True


def are_gradients_divided_differently(reference: Recording, candidate: Recording) -> bool:
    """Whether the ranks of the two systems have different parts of some gradient or parameter.

    A gradient that some ranks lack does not count.
    """
    # A lacking gradient does not affect how other gradients are summed.
    have_as_many = reference.manifest.world_size == candidate.manifest.world_size
    return any(
        tensor.kind == "param" or (tensor.kind == "grad" and not (have_as_many and _is_part_lacking(tensor, *sides)))
        for tensor, sides in tensors_across(reference, candidate)
    )


def box_of(record: Record) -> Box | None:
    """Return the index range of a rank's part. For a plain tensor, this is the whole tensor; for a DTensor of unknown
    range, None.
    """
    return _box_of(record)


def _box_of(part: Record | PartLayout) -> Box | None:
    if part.box is not None:
        return Box.parse(part.box)
    return None if part.placements else Box.whole(part.shape)


def _other_digest(digest: str) -> str:
    return hashlib.blake2b(digest.encode(), digest_size=DIGEST_DIGITS // 2).hexdigest()


def first_few(names: Iterable[str]) -> str:
    names = list(names)
    more = f"; and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return "; ".join(names[:NUM_NAMED]) + more
