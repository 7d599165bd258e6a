"""Pair the records of two recordings by their full key, and report every record without a partner.

Partners have the same step, rank, kind and name. Prefixes of names and the position of a record do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bitproof.harness.records import Key, Record

NUM_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The records of two recordings, paired by equal keys.

    - `pairs`: key -> (record of the reference, record of the candidate), in the reference's order.
    - `missing`: keys that only the reference has. `extra`: keys that only the candidate has.
    - `duplicates`: by role, the keys that a recording has more than once. The first record with such a key is paired.
    - `empty`: the roles whose recording has no record.
    """

    pairs: dict[Key, tuple[Record, Record]] = field(default_factory=dict)
    missing: tuple[Key, ...] = ()
    extra: tuple[Key, ...] = ()
    duplicates: dict[str, tuple[Key, ...]] = field(default_factory=dict)
    empty: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Unpaired:
    """The unpaired keys of several alignments.

    `names` has, by kind, the names of all paired records. The other fields are as in `Alignment`.
    """

    missing: list[Key] = field(default_factory=list)
    extra: list[Key] = field(default_factory=list)
    duplicates: dict[str, list[Key]] = field(default_factory=dict)
    empty: tuple[str, ...] = ("reference", "candidate")
    names: dict[str, set[str]] = field(default_factory=dict)

    def add(self, alignment: Alignment) -> None:
        """Add an alignment. Its records must not be in an alignment that was already added."""
        self.missing += alignment.missing
        self.extra += alignment.extra
        for side, keys in alignment.duplicates.items():
            self.duplicates.setdefault(side, []).extend(keys)
        self.empty = tuple(side for side in self.empty if side in alignment.empty)
        for key in alignment.pairs:
            self.names.setdefault(key.kind, set()).add(key.name)

    @property
    def gaps(self) -> list[str]:
        """A sentence for each gap in the evidence, such as "the candidate lacks 1 record: step 0, rank 1, grad w"."""
        # All records lack a partner if a recording is empty, so this is said once, and no record is named.
        gaps = [f"the {side} recording is empty" for side in self.empty]
        if self.missing and "candidate" not in self.empty:
            gaps.append(f"the candidate lacks {name_keys(self.missing)}")
        if self.extra and "reference" not in self.empty:
            gaps.append(f"the reference lacks {name_keys(self.extra)}")
        gaps += self._differing_names()
        gaps += [f"the {side} recorded twice {name_keys(keys)}" for side, keys in self.duplicates.items()]
        return gaps

    def _differing_names(self) -> Iterator[str]:
        # For example, `grad layers.0.w` and `grad module.layers.0.w` may be the same tensor under two names.
        missing, extra = (_names_by_kind(keys) for keys in (self.missing, self.extra))
        for kind in missing:
            # Names that are paired, or unpaired on both sides, are known to both systems: only
            # some records are missing.
            known = self.names.get(kind, set())
            theirs = [name for name in extra.get(kind, ()) if name not in {*missing[kind], *known}]
            ours = [name for name in missing[kind] if name not in {*extra.get(kind, ()), *known}]
            if ours and theirs:
                yield (
                    f"only the reference has {kind} {_first_few(ours)}; only the candidate has {kind} "
                    f"{_first_few(theirs)}; names are never guessed: if these are the same, say so as `names` of the "
                    "system, or with --names FILE"
                )


def _names_by_kind(keys: Iterable[Key]) -> dict[str, dict[str, None]]:
    names: dict[str, dict[str, None]] = {}
    for key in keys:
        # A dict for its order, as a set.
        names.setdefault(key.kind, {})[key.name] = None
    return names


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:NUM_NAMED]) + (", ..." if len(names) > NUM_NAMED else "")


def align(
    reference: Iterable[tuple[Key, Record]],
    candidate: Iterable[tuple[Key, Record]],
) -> Alignment:
    """Pair two streams of records, such as `recording.records.items()`."""
    reference_records, reference_twice = _index(reference)
    candidate_records, candidate_twice = _index(candidate)
    sides = {"reference": (reference_records, reference_twice), "candidate": (candidate_records, candidate_twice)}
    return Alignment(
        pairs={
            key: (record, candidate_records[key])
            for key, record in reference_records.items()
            if key in candidate_records
        },
        missing=tuple(key for key in reference_records if key not in candidate_records),
        extra=tuple(key for key in candidate_records if key not in reference_records),
        duplicates={side: twice for side, (_, twice) in sides.items() if twice},
        empty=tuple(side for side, (records, _) in sides.items() if not records),
    )


def name_keys(keys: Iterable[Key]) -> str:
    """Return a text with the number of keys, and the first few of them: `2 records: step 0, rank 1, grad w; ...`."""
    keys = list(keys)
    named = "; ".join(f"step {key.step}, rank {key.rank}, {key.kind} {key.name}" for key in keys[:NUM_NAMED])
    rest = f"; and {len(keys) - NUM_NAMED} more" if len(keys) > NUM_NAMED else ""
    return f"{len(keys)} record{'s' if len(keys) != 1 else ''}: {named}{rest}"


def _index(items: Iterable[tuple[Key, Record]]) -> tuple[dict[Key, Record], tuple[Key, ...]]:
    records: dict[Key, Record] = {}
    twice: dict[Key, None] = {}
    for key, record in items:
        if key in records:
            twice[key] = None
        else:
            records[key] = record
    return records, tuple(twice)
