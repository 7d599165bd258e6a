"""Read a recording's table of digests from disk, rank by rank, so that a large recording fits in memory.

- In a long table each rank's rows are a row group, so a rank can be read without the others.
- A table of another form is read as a whole.
- Schema, sizes and every value are checked before use.
- The file stays open, so later reads use the checked file, even if another file now has its name.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bitproof.harness.capture.columns import bools, digests_of, values_of
from bitproof.harness.capture.digest_table import COLUMNS, OPTIONAL, check_values
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key, Manifest, Record, Recording

OF_LAYOUTS = ("cells", "box", "placements")
"""The last columns of a table, in reverse order. A recording leaves out those that are empty, up to the first column
that is not empty."""
_KNOWN_COLUMNS = tuple(pa.schema(list(COLUMNS)[: len(COLUMNS) - count]) for count in range(len(OF_LAYOUTS) + 1))
_FIRST_COLUMNS = pa.schema(
    [*list(COLUMNS)[:6], pa.field("shape", pa.list_(pa.int32()), nullable=False), COLUMNS.field("value")]
)
"""The columns of the oldest recordings, which do not mark NaN and zeros."""

MAX_DIGESTS_BYTES = 4 << 30
MAX_ROWS = 100_000_000
KEPT_ROWS = 1_000_000
"""Tables of at most this many rows stay in memory; a rank of a longer table is read again at each request."""
_BATCH_ROWS = 10_000
_MOST_UNPACKED = 256 << 20
_MOST_TIMES = 1000
"""The limit of a table's size in memory: 256 MiB, or 1,000 times the size of its file if that is more. Digests hardly
compress, but parameters that nothing updates have the same digests at every step."""
_MOST_TEXT, _MOST_PARTS = 1 << 24, 1 << 18
"""The maximum number of bytes of a text, and of row groups, in a file's metadata. In memory Arrow takes ten times as
much for them."""
# The columns in which a rank's rows must agree for equal layouts, and to be recorded alike.
_LAYOUT_COLUMNS = ("step", "kind", "name", "box", "placements")
_COLUMNS_WITHOUT_DIGESTS = ("step", "kind", "name", "dtype", "shape", "content", "placements")


class RankRows:
    """A rank's rows, as columns. The same rows as records, by key, are made at first use."""

    def __init__(self, rank: int, table: pa.Table) -> None:
        self.rank = rank
        self.columns = table

    @property
    def num_rows(self) -> int:
        return len(self.columns)

    @cached_property
    def records(self) -> dict[Key, Record]:
        return read_records(self.columns)

    @cached_property
    def digests(self) -> Any:
        return digests_of(self.columns["digest"])

    @property
    def is_finite(self) -> bool:
        """Whether all losses are finite. Agreement of infinite losses or NaNs proves nothing."""
        # Only "inf" and "nan" have an n: a hexadecimal float has none.
        return not any("n" in text for text in values_of(self.columns["value"].drop_null()))

    def recorded_like(self, other: RankRows) -> bool:
        """Whether `other` has the same rows except for digests and losses. False if a loss of this object is not
        finite.
        """
        return (
            all(self.columns[name].equals(other.columns[name]) for name in _COLUMNS_WITHOUT_DIGESTS) and self.is_finite
        )


class StoredRecording(Recording):
    """A recording whose rows are read from its folder when they are needed.

    Its methods read only the rows of the requested rank, and create objects only for the requested records. Once the
    attribute `records` has been used, all records are in memory. From then on the file is not used, because a caller
    may have changed the records.
    """

    def __init__(self, manifest: Manifest, tables: dict[int, Callable[[], pa.Table]]) -> None:
        self.manifest = manifest
        self._tables = tables

    @cached_property
    def records(self) -> dict[Key, Record]:  # type: ignore[override]
        return {key: record for table in self._tables.values() for key, record in read_records(table()).items()}

    @property
    def holds_records(self) -> bool:
        return "records" in self.__dict__

    def first_steps(self, steps: int) -> Recording:
        manifest = replace(self.manifest, steps=steps, case=self.manifest.case | {"steps": steps})
        return super().first_steps(steps) if self.holds_records else self._part(manifest, lambda step: step < steps)

    def from_step(self, first: int) -> Recording:
        if self.holds_records or not first:
            return super().from_step(first)
        return self._part(self.manifest, lambda step: step >= first)

    def with_manifest(self, manifest: Manifest) -> Recording:
        return super().with_manifest(manifest) if self.holds_records else StoredRecording(manifest, self._tables)

    def _part(self, manifest: Manifest, keeps: Callable[[Any], Any]) -> StoredRecording:
        def part(table: Callable[[], pa.Table]) -> Callable[[], pa.Table]:
            return lambda: _filtered(table(), "step", keeps)

        return StoredRecording(manifest, {rank: part(table) for rank, table in self._tables.items()})

    @property
    def ranks(self) -> Sequence[int]:
        return super().ranks if self.holds_records else tuple(self._tables)

    def records_of(self, rank: int) -> dict[Key, Record]:
        return super().records_of(rank) if self.holds_records else self.of_rank(rank).records

    def records_at(self, rank: int, step: int) -> dict[Key, Record]:
        if self.holds_records:
            return super().records_at(rank, step)
        return read_records(_filtered(self.of_rank(rank).columns, "step", lambda at: at == step))

    def losses_of(self, rank: int) -> dict[Key, Record]:
        if self.holds_records:
            return super().losses_of(rank)
        return read_records(_filtered(self.of_rank(rank).columns, "kind", lambda kind: kind == "loss"))

    def of_rank(self, rank: int) -> RankRows:
        """Return the rows of a rank, in the order in which they are stored; no rows if the rank recorded nothing."""
        return RankRows(rank, self._tables[rank]() if rank in self._tables else COLUMNS.empty_table())


class DigestFile:
    """An open file of digests. When it is opened, its schema and sizes are checked and, if known, its sha256."""

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        check_file(path, MAX_DIGESTS_BYTES)
        self.path = path
        try:
            # The open file is hashed and read, so another file under its name cannot take its place. Parquet files have
            # no checksum: without the hash, a flipped bit in a digest would look like a difference.
            self._source = pa.OSFile(str(path))
            self._num_bytes = self._source.size()
            if sha256 is not None and (found := hashlib.file_digest(self._source, "sha256").hexdigest()) != sha256:
                raise RecordingError(
                    f"{path} is damaged, or not the one that the manifest beside it was written with",
                    expected=f"sha256 {sha256}",
                    found=f"sha256 {found}",
                    fix="record the system again",
                )
            limits = {"thrift_string_size_limit": _MOST_TEXT, "thrift_container_size_limit": _MOST_PARTS}
            plain = pq.ParquetFile(self._source, **limits)
            self._schema: pa.Schema = plain.schema_arrow
            # Text is read as dictionaries: a text of 20 MB in each of a million rows takes 20 MB until it is unpacked.
            texts = [field.name for field in self._schema if field.type == pa.string()]
            self._file = pq.ParquetFile(self._source, metadata=plain.metadata, read_dictionary=texts, **limits)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(path, error) from error
        if not any(map(self._schema.equals, (*_KNOWN_COLUMNS, _FIRST_COLUMNS))):
            found = ", ".join(f"{field.name}: {field.type}" for field in self._schema)
            expected = ", ".join(f"{field.name}: {field.type}" for field in COLUMNS)
            raise RecordingError(f"{path} has the wrong columns", expected=expected, found=found)
        self.num_rows: int = self._file.metadata.num_rows
        self.num_groups: int = self._file.metadata.num_row_groups
        if self.num_rows > MAX_ROWS:
            raise RecordingError(f"{path} is too large", found=f"{self.num_rows} rows")

    def table(self, group: int | None = None) -> pa.Table:
        """Return the rows of a row group or the whole file. Raises RecordingError if they are damaged or too large."""
        groups = None if group is None else [group]
        try:
            # Batch by batch, as the size that the file states is not trusted: a dictionary with a single long name can
            # make a huge table of a small file. Each batch is measured before it is unpacked.
            self._refuse_size(self._stated_bytes(groups or range(self.num_groups)))
            batches, num_bytes = [], 0
            for batch in self._file.iter_batches(_BATCH_ROWS, groups, use_threads=False):  # no threads: the host forks
                num_bytes += _unpacked_bytes(batch)
                self._refuse_size(num_bytes)
                batches.append(_unpacked(batch, self._schema))
            table = pa.Table.from_batches(batches, schema=self._schema)
            for name in OPTIONAL[1:]:
                if name not in table.column_names:
                    table = table.append_column(COLUMNS.field(name), pa.nulls(len(table), pa.string()))
            # Older recordings have other integer types and fewer columns.
            table = table.cast(COLUMNS)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise damaged(self.path, error) from error
        return table

    def _stated_bytes(self, groups: Iterable[int]) -> int:
        parts = map(self._file.metadata.row_group, groups)
        return sum(part.column(index).total_uncompressed_size for part in parts for index in range(part.num_columns))

    def _refuse_size(self, num_bytes: int) -> None:
        most = min(MAX_DIGESTS_BYTES, max(_MOST_UNPACKED, _MOST_TIMES * self._num_bytes))
        if num_bytes > most:
            raise RecordingError(
                f"{self.path} is too large in memory", expected=f"{most} bytes at most", found=f"{num_bytes} bytes"
            )


def _unpacked_bytes(batch: pa.RecordBatch) -> int:
    # Unpacked, 10,000 rows with a single text of 20 MB take 200 GB.
    return sum(map(_column_bytes, batch.columns))


def _column_bytes(column: pa.Array) -> int:
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary).take(column.indices)
    return int(pc.sum(lengths).as_py() or 0) + 4 * len(column)  # an offset for each text


def _unpacked(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [x.dictionary_decode() if pa.types.is_dictionary(x.type) else x for x in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def read_rows(file: DigestFile, manifest: Manifest) -> Recording:
    """Return the recording whose digests are in `file`. Raises RecordingError for a value out of range or a repeated
    key.
    """
    # The statistics of row groups are not read, because Arrow crashes the process if they are damaged.
    if (
        file.num_rows > KEPT_ROWS
        and file.num_groups <= manifest.world_size
        and (found := _read_by_rank(file, manifest))
    ):
        return found
    table = file.table()
    check_values(file.path, table, manifest)
    parts = _by_rank(table)
    if (ranks := [rank for rank, _ in parts]) == sorted(set(ranks)):
        before: RankRows | None = None
        for part in parts:
            before = _checked_keys(file.path, RankRows(*part), before)
        return StoredRecording(manifest, {rank: _in_memory(part) for rank, part in parts})
    # The rows of some rank are not contiguous, so only all records together show a repeated key.
    records = read_records(table)
    _refuse_twice(file.path, len(records), len(table))
    return Recording(manifest, records)


def _read_by_rank(file: DigestFile, manifest: Manifest) -> Recording | None:
    tables: dict[int, Callable[[], pa.Table]] = {}
    before: RankRows | None = None
    for group in range(file.num_groups):
        table = file.table(group)
        check_values(file.path, table, manifest)
        parts = _by_rank(table)
        # Not a row group for each rank, in ascending order: the table is read as a whole.
        if len(parts) != 1 or parts[0][0] <= max(tables, default=-1):
            return None
        before = _checked_keys(file.path, RankRows(*parts[0]), before)
        tables[parts[0][0]] = _read_again(file, group)
    return StoredRecording(manifest, tables)


def empty_layout_columns(table: pa.Table) -> set[str]:
    """Return those of the names `cells`, `box` and `placements` whose columns in the table are empty."""
    return {name for name in OF_LAYOUTS if table[name].null_count == len(table)}


def have_same_rows(first: Recording, second: Recording, rank: int) -> bool:
    """Whether a rank has the same rows, in the same order, in two recordings, and all its losses are finite.

    Columns are compared, without making records. Returns False if all records of a recording are in memory, because
    they may have been changed.
    """
    stored = [side for side in (first, second) if isinstance(side, StoredRecording) and not side.holds_records]
    if len(stored) < 2:
        return False
    rows = [side.of_rank(rank) for side in stored]
    return rows[0].recorded_like(rows[1]) and bool((rows[0].digests == rows[1].digests).all())


def have_same_layout(first: Recording, second: Recording, rank: int) -> bool:
    """Whether a rank has the same tensors in two recordings, at the same steps and in the same layout.

    Columns are compared, without making records. Returns False if all records of a recording are in memory, because
    they may have been changed.
    """
    stored = [side for side in (first, second) if isinstance(side, StoredRecording) and not side.holds_records]
    if len(stored) < 2:
        return False
    here, there = (side.of_rank(rank).columns.select(_LAYOUT_COLUMNS) for side in stored)
    if here.num_rows != there.num_rows:
        return False
    # The same rows may be in another order, so compare them as sets if the tables differ.
    return here.equals(there) or {*zip(*map(values_of, here.columns), strict=True)} == {
        *zip(*map(values_of, there.columns), strict=True)
    }


def read_records(table: pa.Table) -> dict[Key, Record]:
    columns = {name: values_of(table[name]) for name in table.column_names}
    keys = map(Key, columns["step"], columns["kind"], columns["name"], columns["rank"])
    rows = map(Record, *(columns[name] for name in Record._fields))
    return dict(zip(keys, rows, strict=True))


def _filtered(table: pa.Table, column: str, keeps: Callable[[Any], Any]) -> pa.Table:
    # `keeps` gets the column's values as an array, and returns an array of bools.
    return table.filter(bools(keeps(numpy.array(values_of(table[column])))))


def check_file(path: Path, limit: int) -> None:
    """Raise RecordingError if a path is no regular file (a pipe would block), or larger than `limit` bytes."""
    refuse_link(path)
    try:
        status = path.stat()
    except OSError as error:
        raise RecordingError(
            f"{path} cannot be read", found=error.strerror, fix="record the system again, or name another folder"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise RecordingError(f"{path} is not a regular file")
    if status.st_size > limit:
        raise RecordingError(f"{path} is too large", expected=f"{limit} bytes at most", found=f"{status.st_size} bytes")


def refuse_link(path: Path) -> None:
    """Raise RecordingError for a symbolic link: it could lead to any other file, or change while it is read."""
    if path.is_symlink():
        raise RecordingError(f"{path} is a symbolic link", expected="a recording whole in its own folder")


def damaged(path: Path, error: BaseException) -> RecordingError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return RecordingError(
        f"{path} is damaged", found=f"{type(error).__name__}: {reason}", fix="record the system again"
    )


def _by_rank(table: pa.Table) -> list[tuple[int, pa.Table]]:
    ranks = numpy.array(values_of(table["rank"]))
    # The indices at which the rank changes, and both ends.
    starts = [0, *(numpy.flatnonzero(numpy.diff(ranks)) + 1).tolist(), len(ranks)]
    return [(int(ranks[start]), table.slice(start, end - start)) for start, end in pairwise(starts) if start < end]


def _checked_keys(path: Path, rows: RankRows, before: RankRows | None) -> RankRows:
    # `before` has the rows of an earlier rank, whose keys were checked: the same tensors need no second check.
    if before and rows.recorded_like(before):
        return before
    _refuse_twice(path, len(rows.records), rows.num_rows)
    return rows


def _refuse_twice(path: Path, num_keys: int, num_rows: int) -> None:
    if num_keys != num_rows:
        raise RecordingError(f"{path} names a tensor twice", expected="each (step, kind, name, rank) once")


def _in_memory(table: pa.Table) -> Callable[[], pa.Table]:
    return lambda: table


def _read_again(file: DigestFile, group: int) -> Callable[[], pa.Table]:
    # A function of its own: a lambda in the caller's loop would read the last `group`.
    return lambda: file.table(group)
