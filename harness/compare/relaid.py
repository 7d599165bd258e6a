"""Two systems that lay tensors out otherwise, compared by logical tensor.

Both first runs say what part of what tensor each rank holds. The cuts of all these parts divide a tensor into cells,
and a second run of each system records the digest of each cell. From them follows what the reference would have
recorded, had it been laid out as the candidate is: that is paired with the candidate's records, as ever. Nothing is
gathered, and no process holds more than a rank's own part.

- A rank of the candidate that holds a cell of other bits than the reference's differs in that tensor.
- What is whole on several ranks of the reference must be the same on all of them. Where it is not, some rank of the
  candidate differs from one of them, and `replicas` says which tensor it is.
- A plain tensor counts as whole. Where the candidate has as many ranks, and each holds the same part as in the
  reference, records pair rank by rank, and plain tensors may be another on each.
- A cell that only one side holds is a gap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from bitproof.harness.case import Case, Kind
from bitproof.harness.records import Key, Record, Recording
from bitproof.harness.records.layout import DIGEST_DIGITS, Box, Cell, Cuts, alike, joint_cuts, name_cell

NUM_NAMED = 5


class LogicalTensor(NamedTuple):
    """A tensor at a step, on whatever ranks."""

    step: int
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} {self.name}"


Parts = Mapping[int, Record]
"""What each rank that holds any of a tensor recorded of it."""


@dataclass(frozen=True)
class Relaid:
    """The reference's recording as it would be in the candidate's layout, and what that revealed.

    `across` are the tensors that had to be compared by cells. `unusable` says why the evidence is incomplete, and
    `apart` names tensors whose replicas differ within the reference or within the candidate.
    """

    recording: Recording
    across: frozenset[LogicalTensor]
    unusable: tuple[str, ...]
    apart: tuple[str, ...]
    parted: frozenset[LogicalTensor]


def are_laid_out_otherwise(case: Case, reference: Recording, candidate: Recording) -> bool:
    """Whether some tensor has another layout on the two systems' ranks, or the case says that their meshes differ."""
    return case.reference_parallelism is not None or any(True for _ in _across(reference, candidate))


def lack_state_alone(case: Case, reference: Recording, candidate: Recording) -> bool:
    """Whether layouts differ in nothing but that ranks lack optimizer state of a parameter: calls have partners.

    So it is where a rank leaves a parameter out of its update, or another one updates it for all.
    """

    def lies_alike(here: Parts, there: Parts) -> bool:
        both = here.keys() & there
        return not lies_otherwise({rank: here[rank] for rank in both}, {rank: there[rank] for rank in both}, True)

    tensors = () if case.reference_parallelism is not None else _across(reference, candidate)
    found = [tensor.kind == "optimizer" and lies_alike(*sides) for tensor, sides in tensors]
    return bool(found) and all(found)


def common_cuts(reference: Recording, candidate: Recording) -> dict[str, Cuts]:
    """The cuts of each tensor whose layouts differ, by kind and name. A tensor of two logical shapes has none."""
    boxes: dict[str, set[Box]] = {}
    for tensor, sides in _across(reference, candidate):
        parts = [box_of(record) for side in sides for record in side.values()]
        boxes.setdefault(f"{tensor.kind}/{tensor.name}", set()).update(box for box in parts if box is not None)
    return {name: joint_cuts(same) for name, found in boxes.items() if (same := alike(found))}


def relaid(reference: Recording, candidate: Recording, cuts: Mapping[str, Cuts]) -> Relaid:
    """The reference in the candidate's layout, from two recordings with the digests of the cells of `cuts`."""
    records = dict(reference.records)
    across: list[LogicalTensor] = []
    unusable: list[str] = []
    apart: list[str] = []
    parted: set[LogicalTensor] = set()
    for tensor, (here, there) in _across(reference, candidate):
        across.append(tensor)
        for rank in here:
            del records[Key(*tensor, rank)]
        at = cuts.get(f"{tensor.kind}/{tensor.name}")
        cells = _Cells(tensor, here, there, at)
        records |= cells.records()
        unusable += cells.unusable
        apart += (told := [*cells.apart()])
        parted |= {tensor} if told else set()
    order = {key: place for place, key in enumerate(candidate.records)}
    records = dict(sorted(records.items(), key=lambda item: order.get(item[0], len(order))))
    manifest = replace(reference.manifest, case=candidate.manifest.case, world_size=candidate.manifest.world_size)
    texts = tuple(unusable), tuple(dict.fromkeys(apart))
    return Relaid(Recording(manifest, records), frozenset(across), *texts, frozenset(parted))


def replicas(recording: Recording) -> Iterator[LogicalTensor]:
    """Each tensor whose DTensor says that ranks hold the same part, and they do not."""
    for tensor, parts in by_rank(recording).items():
        found: dict[str, set[str]] = {}
        for record in parts.values():
            if record.box is not None:
                found.setdefault(record.box, set()).add(record.digest)
        if any(len(digests) > 1 for digests in found.values()):
            yield tensor


class _Cells:
    """One tensor's cells on both sides, where each side has it."""

    def __init__(self, tensor: LogicalTensor, here: Parts, there: Parts, cuts: Cuts | None) -> None:
        self._tensor, self._here, self._there, self._cuts = tensor, here, there, cuts
        self.unusable: list[str] = []
        if any(box_of(record) is None for side in (here, there) for record in side.values()):
            self.unusable.append(f"which parts ranks hold is not known of {tensor}")
        self._sides = [self._digests(side, parts) for side, parts in (("reference", here), ("candidate", there))]

    def records(self) -> dict[Key, Record]:
        """The recording that the reference would have made on the candidate's ranks."""
        found: dict[Key, Record] = {}
        if not (self._here and self._there):
            return {Key(*self._tensor, rank): record for rank, record in self._here.items()}
        for rank, record in self._there.items():
            if (other := self._as_in(rank, record)) is not None:
                found[Key(*self._tensor, rank)] = other
        if self._cuts is not None:
            left = {cell for cells in self._sides[0].values() for cell in cells}
            left -= {cell for cells in self._sides[1].values() for cell in cells}
            first = next(iter(self._here.values()))
            for cell in sorted(left):
                found[Key(*self._tensor[:2], f"{self._tensor.name}{name_cell(cell)}", 0)] = first
        return found

    def apart(self) -> Iterator[str]:
        """Where ranks of one side hold other bits of one cell."""
        for side, parts, cells in zip(("reference", "candidate"), (self._here, self._there), self._sides, strict=True):
            is_placed = all(record.placements for record in parts.values())
            if any(len(digests) > 1 for digests in _by_cell(cells).values()):
                what = "replicas" if is_placed else "plain tensors, which count as whole on each rank,"
                yield f"{what} of one tensor differ within the {side}: {self._tensor}"

    def _as_in(self, rank: int, record: Record) -> Record | None:
        """The candidate's record on a rank as the reference has it; None where it lacks a cell of it."""
        first = next(iter(self._here.values()))
        if self._cuts is None or first.dtype != record.dtype:
            return record._replace(digest=_other(record.digest), dtype=first.dtype, shape=first.shape)
        here, own = _by_cell(self._sides[0]), self._sides[1].get(rank, {})
        if any(cell not in here for cell in own) or (not own and 0 not in record.shape):
            return None
        differing = [cell for cell, digest in own.items() if here[cell] != {digest}]
        return record._replace(digest=_other(record.digest), value=first.value) if differing else record

    def _digests(self, side: str, parts: Parts) -> dict[int, dict[Cell, str]]:
        """Of each rank the digest of each cell that it holds."""
        found: dict[int, dict[Cell, str]] = {}
        if (cuts := self._cuts) is None:
            return found
        for rank, record in parts.items():
            box = known.cut_by(cuts) if (known := box_of(record)) is not None else None
            cells = box.cells(cuts) if box is not None else []
            text = record.cells or ""
            if box is None or len(text) != DIGEST_DIGITS * len(cells) or record.cells is None:
                self.unusable.append(f"the {side} has no digests of cells of {self._tensor} on rank {rank}")
                continue
            digests = (text[at : at + DIGEST_DIGITS] for at in range(0, len(text), DIGEST_DIGITS))
            found[rank] = dict(zip(cells, digests, strict=True))
        return found


def _by_cell(ranks: Mapping[int, Mapping[Cell, str]]) -> dict[Cell, set[str]]:
    found: dict[Cell, set[str]] = {}
    for cells in ranks.values():
        for cell, digest in cells.items():
            found.setdefault(cell, set()).add(digest)
    return found


def _across(reference: Recording, candidate: Recording) -> Iterator[tuple[LogicalTensor, tuple[Parts, Parts]]]:
    """The tensors that do not pair rank by rank, in the order in which the reference recorded them."""
    here, there = by_rank(reference), by_rank(candidate)
    have_as_many = reference.manifest.world_size == candidate.manifest.world_size
    for tensor in {**here, **there}:
        sides = here.get(tensor, {}), there.get(tensor, {})
        if lies_otherwise(*sides, have_as_many):
            yield tensor, sides


def lies_otherwise(here: Parts, there: Parts, have_as_many: bool) -> bool:
    """Whether a tensor's records do not pair rank by rank. A tensor that one side lacks has no other layout."""
    left, right = (
        {rank: (record.box, record.placements is None) for rank, record in side.items()} for side in (here, there)
    )
    return not have_as_many or bool(left and right and left != right)


def by_rank(recording: Recording) -> dict[LogicalTensor, dict[int, Record]]:
    """Each tensor's records, by rank."""
    found: dict[LogicalTensor, dict[int, Record]] = {}
    for key, record in recording.records.items():
        found.setdefault(LogicalTensor(key.step, key.kind, key.name), {})[key.rank] = record
    return found


def are_staged(*recordings: Recording) -> bool:
    """Whether each recording has parameters, each of them whole on one rank alone, as in the stages of a pipeline."""
    for recording in recordings:
        parameters = [parts for tensor, parts in by_rank(recording).items() if tensor.kind == "param"]
        if not parameters or any(
            len(parts) > 1 or any(x.placements is not None for x in parts.values()) for parts in parameters
        ):
            return False
    return True


def gradients_lie_otherwise(reference: Recording, candidate: Recording) -> bool:
    """Whether the ranks hold other parts of some gradient or parameter than the other system's do."""
    return any(tensor.kind in ("grad", "param") for tensor, _ in _across(reference, candidate))


def box_of(record: Record) -> Box | None:
    """What a rank holds: all of a plain tensor. None where a DTensor does not say it."""
    if record.box is not None:
        return Box.parse(record.box)
    return None if record.placements else Box.whole(record.shape)


def _other(digest: str) -> str:
    """A placeholder that differs from this digest, for a cell that has no digest of its own."""
    return hashlib.blake2b(digest.encode(), digest_size=DIGEST_DIGITS // 2).hexdigest()


def first_few(names: Iterable[str]) -> str:
    """The first of some, and how many more there are."""
    names = list(names)
    more = f"; and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return "; ".join(names[:NUM_NAMED]) + more
