"""Compare the records of two recordings rank by rank, and add up the results.

1. Pair the records of a rank, and keep records without a partner.
2. Check that the case's required kinds are there at each step, with the same names, and that digests are well formed.
3. Compare dtype and shape, then digests.
4. Keep the differing records that were computed first.

Most ranks have the same names, dtypes and shapes at the same steps. They form a group: gaps, counts and the order of
computation are determined only once, for its first rank. For its other ranks, only digests are compared. So a thousand
ranks take seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy

from bitproof.harness.capture.stored import RankRows, StoredRecording
from bitproof.harness.case import KINDS, Case
from bitproof.harness.compare.align import NUM_NAMED, Alignment, Unpaired, align
from bitproof.harness.compare.one_sided import OneSided, one_sided
from bitproof.harness.compare.order import ComputationOrder, ComputedAt
from bitproof.harness.compare.part_layouts import has_part
from bitproof.harness.compare.vacuity import Agreement
from bitproof.harness.records import (
    MAX_DIFFERING,
    ROLES,
    Divergence,
    Key,
    Record,
    Recording,
    Role,
    TensorDifference,
    needs_one_rank,
    required_kinds,
    zero_counts,
)

# Each group keeps the rows of its first rank in memory, and every rank is compared with each group.
_MAX_LIKENESSES = 16
_is_digest = re.compile("[0-9a-f]{32}").fullmatch


class DifferingPair(NamedTuple):
    """Two paired records that differ, and their position in the run.

    `records` are the reference's and the candidate's record. Their digests may be those of another rank, if that rank
    recorded the same names, dtypes and shapes.
    """

    place: ComputedAt
    key: Key
    records: tuple[Record, Record]

    @property
    def divergence(self) -> Divergence:
        """A Divergence for this record, in which the differing bits and the call to blame are not set."""
        types = [_describe_type(record) for record in self.records]
        tensor = TensorDifference(reference_type=types[0], candidate_type=types[1])
        key = self.key
        return Divergence(step=key.step, rank=key.rank, kind=key.kind, name=key.name, tensor=tensor)


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """A group of ranks whose records are alike in all fields but digests, and facts that hold for each of them.

    - `reference`, `candidate`: the rows of the group's first rank. Each row is a record.
    - `keys`: the key of each of the reference's rows.
    - `partners`: for each of the reference's rows, the index of the candidate's row with the same key.
    - `computed`: the indices of the reference's rows in the order of computation.
    - `kinds`: for each of the reference's rows, a number; rows of the same step and kind have the same number.
    - `tensors`: likewise, but rows of the same kind and name have the same number.
    - `compared`: the number of rows of each kind.
    - `seen`: the pairs of step and kind that occur.
    """

    reference: RankRows
    candidate: RankRows
    keys: list[Key]
    partners: Any
    computed: Any
    kinds: Any
    tensors: Any
    compared: dict[str, int]
    seen: frozenset[tuple[int, str]]

    def fits(self, reference: RankRows, candidate: RankRows) -> bool:
        return reference.recorded_like(self.reference) and candidate.recorded_like(self.candidate)


@dataclass(kw_only=True)
class Evidence:
    """The comparison of two recordings so far.

    - `compared`, `mismatched`: the numbers of compared and of differing records, by kind.
    - `first`: the differing record that was computed first.
    - `kinds`: the kinds that differ at each step.
    - `shown`: whether agreement is evidence. For example, equal tensors of zeros are no evidence.
    - `one_sided`: buffers and settings that only one system has, which do not count as gaps. Set at the end, from
      `unpaired_state`.
    """

    case: Case
    compared: dict[str, int] = field(default_factory=zero_counts)
    mismatched: Counter[str] = field(default_factory=Counter)
    first: DifferingPair | None = None
    kinds: dict[int, set[str]] = field(default_factory=dict)
    is_sharded_otherwise: bool = False
    shown: Agreement = field(default_factory=Agreement)
    order: ComputationOrder = field(default_factory=ComputationOrder)
    one_sided: OneSided = field(default_factory=OneSided)
    unpaired_state: dict[Role, list[tuple[Key, Record]]] = field(default_factory=lambda: {role: [] for role in ROLES})
    _unpaired: Unpaired = field(default_factory=Unpaired)
    _seen: dict[int, frozenset[tuple[int, str]] | set[tuple[int, str]]] = field(default_factory=dict)
    _skipped: list[str] = field(default_factory=list)
    _unusable: list[str] = field(default_factory=list)
    _unlike: dict[Key, str] = field(default_factory=dict)
    _sharded: dict[Key, str] = field(default_factory=dict)
    _differing: list[DifferingPair] = field(default_factory=list)
    _is_full: bool = False
    _likenesses: list[RankGroup] = field(default_factory=list)

    @property
    def gaps(self) -> list[str]:
        """A sentence for each gap in the evidence, such as a record that only one system has; empty without gaps."""
        # An empty recording lacks everything, so single kinds are not named. One-sided buffers are judged elsewhere.
        absent = [] if self._unpaired.empty else [*self._missing_kinds()]
        missing, extra = (
            [key for key in keys if not self.one_sided.covers(key)]
            for keys in (self._unpaired.missing, self._unpaired.extra)
        )
        unpaired = replace(self._unpaired, missing=missing, extra=extra)
        return [*unpaired.gaps, *absent, *self._skipped, *self._unusable]

    @property
    def layouts(self) -> tuple[str, ...]:
        return tuple((self._unlike | self._sharded).values())

    @property
    def differing(self) -> list[Key]:
        """The keys of the differing records that were computed first, at most MAX_DIFFERING, in order of computation.

        Records at steps or on ranks that the case does not compare are left out.
        """
        return [found.key for found in sorted(self._differing)[:MAX_DIFFERING]]

    @property
    def num_differing(self) -> int:
        """The number of all differing records, except those of a kind that bitproof does not know."""
        return sum(self.mismatched.values())

    def add(self, reference: Mapping[Key, Record], candidate: Mapping[Key, Record]) -> bool:
        """Add the records of some ranks. Returns False if the records have a defect other than differing digests.

        For example, a record has no partner, partners differ in dtype, or the case does not have the step.
        """
        alignment = align(reference.items(), candidate.items())
        # The lengths show at the end whether these records added a problem.
        before = len(self._skipped), len(self._unusable), len(self._unlike), len(self._sharded)
        self._unpaired.add(alignment)
        self.order.add(alignment.pairs)
        unpaired = {*alignment.missing, *alignment.extra}
        # A buffer or a changed setting of one system alone may be no gap: `one_sided` decides at the end.
        for role, keys, records in zip(
            ROLES, (alignment.missing, alignment.extra), (reference, candidate), strict=True
        ):
            self.unpaired_state[role] += [
                (key, records[key]) for key in keys if key.kind == "buffer" or key.is_changed_setting
            ]
        for key, pair in alignment.pairs.items():
            if key.kind in KINDS:
                self.compared[key.kind] = self.compared.get(key.kind, 0) + 1
            self._seen.setdefault(key.rank, set()).add((key.step, key.kind))  # type: ignore[union-attr]
            self.shown.add(key, pair)
            self._unusable += _unusable(key, pair, self.case)
            # Digest, dtype and shape: all other fields follow from these or from the layout.
            if pair[0][:3] != pair[1][:3]:
                self._add_differing(DifferingPair(self.order(key), key, pair))
        self._skipped += _skipped(alignment, unpaired, self.case)
        after = len(self._skipped), len(self._unusable), len(self._unlike), len(self._sharded)
        return not (unpaired or alignment.duplicates or alignment.empty) and before == after

    def add_rank(self, reference: RankRows, candidate: RankRows) -> None:
        """Add the rows of a rank from both recordings.

        If the rank's records are like those of a known group of ranks, only digests are compared. If not, the rank may
        become the first of a new group.
        """
        for likeness in self._likenesses:
            if likeness.fits(reference, candidate):
                return self._add_like(likeness, reference, candidate)
        if self.add(reference.records, candidate.records) and reference.is_finite and candidate.is_finite:
            # Newest first: the next rank most likely recorded like this rank.
            self._likenesses = [self._likeness(reference, candidate), *self._likenesses][:_MAX_LIKENESSES]
        return None

    def _likeness(self, reference: RankRows, candidate: RankRows) -> RankGroup:
        # The two systems may have recorded in different orders, so each row gets its partner's index.
        keys, rows = [*reference.records], {key: row for row, key in enumerate(candidate.records)}
        places = [self.order(key) for key in keys]
        seen = self._seen[reference.rank]
        numbers = [_numbered((key.step, key.kind) for key in keys), _numbered((key.kind, key.name) for key in keys)]
        return RankGroup(
            reference=reference,
            candidate=candidate,
            keys=keys,
            partners=numpy.array([rows[key] for key in keys]),
            computed=numpy.array(sorted(range(len(keys)), key=places.__getitem__)),
            kinds=numbers[0],
            tensors=numbers[1],
            compared=Counter(key.kind for key in keys),
            seen=frozenset(seen),
        )

    def _add_like(self, likeness: RankGroup, reference: RankRows, candidate: RankRows) -> None:
        for kind, count in likeness.compared.items():
            self.compared[kind] = self.compared.get(kind, 0) + count
        self._seen[reference.rank] = likeness.seen
        # A vectorized comparison of digests: all other columns are known to be equal.
        differs = reference.digests != candidate.digests[likeness.partners]
        if not differs.any():
            return
        rows = numpy.flatnonzero(differs)
        # Once per step and kind, and not once per record: a rank may have a hundred thousand differing records.
        for row, count in _first_rows(likeness.kinds[rows], rows):
            key = likeness.keys[row]
            self.mismatched[key.kind] += count
            self.kinds.setdefault(key.step, set()).add(key.kind)
        for numbers in (likeness.kinds, likeness.tensors):
            for row, _ in _first_rows(numbers[rows], rows):
                self.shown.add_differing(likeness.keys[row])
        # The group's records stand for this rank's: they have the same types, and a divergence shows no digests. In the
        # order of computation, so that the loop can end at the first record that is not kept.
        sides = likeness.reference.records, likeness.candidate.records
        for row in likeness.computed[differs[likeness.computed]]:
            like = likeness.keys[row]
            key = like._replace(rank=reference.rank)
            found = DifferingPair(self.order(key), key, (sides[0][like], sides[1][like]))
            if not self._keep_first(found):
                break

    def _add_differing(self, found: DifferingPair) -> None:
        # Several problems may be true of one pair: other types are named, and the difference counts in any case.
        key, (reference, candidate) = found.key, found.records
        text = _describe_layouts(key, reference, candidate)
        if _type(reference) != _type(candidate):
            self._unlike[key] = text
        if _are_sharded_otherwise(reference, candidate):
            self._sharded[key], self.is_sharded_otherwise = text, True
        if key.kind in KINDS:
            self.mismatched[key.kind] += 1
            self.kinds.setdefault(key.step, set()).add(key.kind)
            self._keep_first(found)

    def _keep_first(self, found: DifferingPair) -> bool:
        if self.first is None or found < self.first:
            self.first = found
        # A record outside the case is a gap, and named as such; it must not end the search for others.
        if not is_inside(found.key, self.case):
            return True
        if self._is_full and found > self._differing[MAX_DIFFERING - 1]:
            # Records that are computed later are not among the first MAX_DIFFERING either.
            return False
        self._differing.append(found)
        # Sort only after MAX_DIFFERING more records: sorting at each would be quadratic.
        if len(self._differing) >= 2 * MAX_DIFFERING:
            self._differing = sorted(self._differing)[:MAX_DIFFERING]
            self._is_full = True
        return True

    def _missing_kinds(self) -> Iterator[str]:
        ranks, nothing = range(self.case.parallelism.world_size), frozenset[tuple[int, str]]()
        # For a kind that a single rank must record, any rank's record is enough.
        on_any = {place for seen in self._seen.values() for place in seen}
        for kind in required_kinds(self.case):
            is_enough = on_any if needs_one_rank(kind, self.case) else nothing
            steps = [step for step in self.case.compared_steps if (step, kind) not in is_enough]
            absent = [
                (step, rank) for step in steps for rank in ranks if (step, kind) not in self._seen.get(rank, nothing)
            ]
            if absent:
                is_users = kind == "loss" and self.case.is_foreign
                fix = ": return the loss from step, on one rank at least" if is_users else ""
                yield f"no {kind} was compared at {_describe_places(absent)}{fix}"


def evidence_of(reference: Recording, candidate: Recording, case: Case) -> Evidence:
    """Compare two recordings, rank by rank unless all records of a recording are already in memory."""
    # Stored recordings are compared by columns (`add_rank`), others record by record.
    evidence, sides = Evidence(case=case), (reference, candidate)
    stored = [side for side in sides if isinstance(side, StoredRecording)]
    if any(side.holds_records for side in sides):
        evidence.add(reference.records, candidate.records)
    else:
        for rank in sorted({rank for side in sides for rank in side.ranks}):
            if len(stored) == 2:
                evidence.add_rank(*(side.of_rank(rank) for side in stored))
            else:
                evidence.add(*(side.records_of(rank) for side in sides))
    evidence.one_sided = one_sided(sides, evidence.unpaired_state, len(case.compared_steps))
    return evidence


def is_inside(key: Key, case: Case) -> bool:
    return key.step in case.compared_steps and 0 <= key.rank < case.parallelism.world_size


def _describe_type(record: Record) -> str:
    return f"{record.dtype}{list(record.shape)}" + (f", {record.placements}" if record.placements else "")


def _type(record: Record) -> tuple[str, tuple[int, ...]]:
    return record.dtype, record.shape


def _are_sharded_otherwise(reference: Record, candidate: Record) -> bool:
    # A gradient of None has no placements, which is no other sharding.
    is_same_part = reference.box is not None and reference.box == candidate.box
    has_both = has_part(reference) and has_part(candidate)
    return reference.placements != candidate.placements and has_both and not is_same_part


def _describe_layouts(key: Key, reference: Record, candidate: Record) -> str:
    here, there = _describe_type(reference), _describe_type(candidate)
    # A rank without a part of the tensor has a record without elements, such as float32[0].
    if has_part(reference) != has_part(candidate):
        here, there = (text if has_part(part) else "none" for text, part in ((here, reference), (there, candidate)))
    sharded = "sharded otherwise: " if _are_sharded_otherwise(reference, candidate) else ""
    return f"{_describe_key(key)}: {sharded}{here} in the reference, {there} in the candidate"


def _skipped(alignment: Alignment, unpaired: set[Key], case: Case) -> Iterator[str]:
    for kind, name, rank in dict.fromkeys((key.kind, key.name, key.rank) for key in alignment.pairs):
        if kind == "rng" or Key(0, kind, name, rank).is_changed_setting:
            # Recorded only at steps that draw from it or change it.
            continue
        # A record that only one system has is unpaired, and named there.
        keys = (Key(step, kind, name, rank) for step in case.compared_steps)
        if steps := [key.step for key in keys if key not in alignment.pairs and key not in unpaired]:
            named = ", ".join(str(step) for step in steps[:NUM_NAMED])
            yield f"neither side recorded {kind} {name} on rank {rank} at step {named}, though both did at others"


def _unusable(key: Key, pair: tuple[Record, Record], case: Case) -> Iterator[str]:
    if key.kind not in KINDS or not is_inside(key, case):
        yield f"{_describe_key(key)} is outside the case ({case.steps} steps, {case.parallelism.world_size} ranks)"
    if not (_is_digest(pair[0].digest) and _is_digest(pair[1].digest)):
        yield f"{_describe_key(key)} has no digest of 32 hexadecimal digits"


def _describe_key(key: Key) -> str:
    return f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"


def _describe_places(places: list[tuple[int, int]]) -> str:
    named = "; ".join(f"step {step}, rank {rank}" for step, rank in places[:NUM_NAMED])
    return named + (f"; and {len(places) - NUM_NAMED} more" if len(places) > NUM_NAMED else "")


def _numbered(values: Iterable[Any]) -> Any:
    numbers: dict[Any, int] = {}
    return numpy.array([numbers.setdefault(value, len(numbers)) for value in values])


def _first_rows(numbers: Any, rows: Any) -> Iterator[tuple[int, int]]:
    # For each distinct number: the first row that has it, and the count of rows that have it.
    _, places, counts = numpy.unique(numbers, return_index=True, return_counts=True)
    yield from zip(rows[places].tolist(), counts.tolist(), strict=True)
