"""A recording's folder: manifest.json, digests.parquet and, in values/, the chosen tensors of each rank.

Nothing read from it is trusted or executed.

Writing goes to a sibling that is renamed at the end, so a folder appears whole or not at all.
Reading checks types, names, ranges and sizes, and refuses with RecordingError naming the file. The manifest has
the sha256 of every other file, and of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bitproof.harness.capture.columns import column, values_of
from bitproof.harness.capture.digest_table import COLUMNS, OPTIONAL, check_values
from bitproof.harness.capture.selection import are_patterns
from bitproof.harness.case.bounds import MOST_STEPS_OF_RANKS
from bitproof.harness.errors import RecordingError
from bitproof.harness.records import SCHEMA, KeptCalls, Key, Manifest, Record, Recording

MANIFEST = "manifest.json"
DIGESTS = "digests.parquet"
VALUES = "values"
CALLS = "calls"

_OF_LAYOUTS = ("cells", "box", "placements")
"""The last columns, from the last on: a recording is without those that have nothing to say."""
_WITHOUT = tuple(pa.schema(list(COLUMNS)[: len(COLUMNS) - count]) for count in range(len(_OF_LAYOUTS) + 1))
_FIRST_COLUMNS = pa.schema(
    [*list(COLUMNS)[:6], pa.field("shape", pa.list_(pa.int32()), nullable=False), COLUMNS.field("value")]
)
"""What recordings had before they marked NaN and zeros."""

_REQUIRED: dict[str, type] = {
    "schema": int,
    "case": dict,
    "system": str,
    "world_size": int,
    "steps": int,
    "digests_sha256": str,
    "manifest_sha256": str,
}
_MAX_MANIFEST_BYTES = 64 << 20
MAX_DIGESTS_BYTES = 4 << 30
_MAX_VALUES_BYTES = 1 << 40
MAX_CALLS_BYTES = 1 << 30
MAX_ROWS = 100_000_000
_MAX_DEPTH = 50
_BATCH_ROWS = 10_000


def write_recording(folder: Path, manifest: Manifest, rows: Iterable[tuple[Key, Record]]) -> None:
    """Write a whole recording at `folder`, replacing one that is there. Rows keep their order."""
    _write_folder(folder, manifest, _table(rows))


def join_parts(folder: Path, manifest: Manifest, parts: Iterable[Path], values: Sequence[Path] = ()) -> None:
    """Write the ranks' parts, in the order given, as one recording; their files of `values` move into it."""
    _write_folder(folder, manifest, pa.concat_tables([_read_table(part) for part in parts]), values)


def checked_values_path(folder: Path, manifest: Manifest, rank: int) -> Path:
    """One rank's file of values, once it is seen to be the one that the manifest was written with."""
    path = _values_path(folder, rank)
    known = manifest.values_sha256
    if known is None or len(known) != manifest.world_size:
        raise RecordingError(
            f"{folder} holds no values",
            expected=f"values of {manifest.world_size} ranks, which a case with a bound records",
            fix="record the system again, with --values or a bound in the case",
        )
    _refuse_link(path.parent)
    _check_file(path, _MAX_VALUES_BYTES)
    if (found := _sha256(path)) != known[rank]:
        raise RecordingError(
            f"{path} is damaged, or not the one that {MANIFEST} was written with",
            expected=f"sha256 {known[rank]}",
            found=f"sha256 {found}",
            fix="record the system again",
        )
    return path


def add_calls(folder: Path, step: int, logs: Sequence[bytes]) -> None:
    """Put the logs of a step's calls beside a recording, a file a rank, and say so in its manifest."""
    (folder / CALLS).mkdir()
    for rank, content in enumerate(logs):
        _calls_path(folder, rank).write_bytes(content)
    sums = [_sha256(_calls_path(folder, rank)) for rank in range(len(logs))]
    restate(folder, calls=KeptCalls(step=step, sha256=sums))


def restate(folder: Path, **facts: Any) -> None:
    """Say more in a recording's manifest, of what is known only once it was made."""
    about = {"schema": SCHEMA} | replace(read_manifest(folder), **facts).to_dict()
    about["manifest_sha256"] = sha256_of_manifest(about)
    partial = folder / f".{MANIFEST}.{os.getpid()}.partial"
    partial.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST)


def checked_calls_path(folder: Path, manifest: Manifest, rank: int) -> Path:
    """One rank's log of calls, once it is seen to be the one that the manifest was written with."""
    path = _calls_path(folder, rank)
    if manifest.calls is None or len(manifest.calls.sha256) != manifest.world_size:
        raise RecordingError(f"{folder} holds no log of calls of each rank")
    _refuse_link(path.parent)
    _check_file(path, MAX_CALLS_BYTES)
    if (found := _sha256(path)) != manifest.calls.sha256[rank]:
        raise RecordingError(
            f"{path} is damaged, or not the one that {MANIFEST} was written with",
            expected=f"sha256 {manifest.calls.sha256[rank]}",
            found=f"sha256 {found}",
        )
    return path


def _calls_path(folder: Path, rank: int) -> Path:
    return folder / CALLS / f"rank{rank}.zip"


def write_part(path: Path, rows: Iterable[tuple[Key, Record]]) -> None:
    """Write one rank's rows as a file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    pq.write_table(_table(rows), partial, compression="zstd")
    partial.replace(path)


def read_recording(folder: Path) -> Recording:
    """Read and check a recording's manifest and digests; values are checked when they are read.

    Raises RecordingError when anything is missing, damaged or hostile.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    path = folder / DIGESTS
    _check_file(path, MAX_DIGESTS_BYTES)
    if (found := _sha256(path)) != manifest.digests_sha256:
        raise RecordingError(
            f"{path} is damaged, or not the one that {MANIFEST} beside it was written with",
            expected=f"sha256 {manifest.digests_sha256}",
            found=f"sha256 {found}",
            fix="record the system again",
        )
    table = _read_table(path)
    check_values(path, table, manifest)
    columns = {name: values_of(table[name]) for name in table.column_names}
    keys = map(Key, columns["step"], columns["kind"], columns["name"], columns["rank"])
    rows = map(Record, *(columns[name] for name in Record._fields))
    records = dict(zip(keys, rows, strict=True))
    if len(records) != table.num_rows:
        raise RecordingError(f"{path} names a tensor twice", expected="each (step, kind, name, rank) once")
    return Recording(manifest, records)


def put_in_place(new: Path, folder: Path) -> None:
    """Rename a finished folder to `folder`. One that is there already goes last, when the new one has its place."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def warm_up() -> None:
    """Have what writing and reading a table load on first use, for which each forked rank would pay."""
    written = pa.BufferOutputStream()
    pq.write_table(_table([]), written)
    pq.ParquetFile(pa.BufferReader(written.getvalue())).read(use_threads=False)


def _table(rows: Iterable[tuple[Key, Record]]) -> pa.Table:
    keys, records = [], []
    for key, record in rows:
        keys.append(key)
        records.append(record)
    columns = dict(
        zip((*Key._fields, *Record._fields), (*_transposed(keys, Key), *_transposed(records, Record)), strict=True)
    )
    return pa.Table.from_arrays([column(columns[field.name], field) for field in COLUMNS], schema=COLUMNS)


def _transposed(rows: Sequence[Any], kind: Any) -> Sequence[Sequence[Any]]:
    """The columns of rows of one kind; empty ones where there are no rows."""
    return list(zip(*rows, strict=True)) or [()] * len(kind._fields)


def _values_path(folder: Path, rank: int) -> Path:
    return folder / VALUES / f"rank{rank}.safetensors"


def _write_folder(folder: Path, manifest: Manifest, table: pa.Table, values: Sequence[Path] = ()) -> None:
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in _OF_LAYOUTS:
        if table[name].null_count < len(table):
            break
        table = table.drop_columns(name)
    try:
        pq.write_table(table, partial / DIGESTS, compression="zstd")
        about = {"schema": SCHEMA} | manifest.to_dict() | {"digests_sha256": _sha256(partial / DIGESTS)}
        del about["values_sha256"]  # of another folder, if the manifest was read from one
        for rank, source in enumerate(values):
            path = _values_path(partial, rank)
            path.parent.mkdir(exist_ok=True)
            shutil.move(source, path)
            about.setdefault("values_sha256", []).append(_sha256(path))
        about["manifest_sha256"] = sha256_of_manifest(about)
        (partial / MANIFEST).write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sha256(path: Path) -> str:
    """Parquet checks no content of its own: a flipped bit in it could pass for another digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_manifest(manifest: Mapping[str, Any]) -> str:
    """The sha256 of what a manifest says, however it is laid out in its file."""
    content = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check a recording's manifest alone. Raises RecordingError when it is missing, damaged or hostile."""
    path = folder / MANIFEST
    _check_file(path, _MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(manifest, dict):
        raise RecordingError(f"{path} is no manifest", expected="a JSON object", found=type(manifest).__name__)
    for name, kind in _REQUIRED.items():
        if type(manifest.get(name)) is not kind:
            raise RecordingError(
                f"{path} is no manifest",
                expected=f"{name}, of type {kind.__name__}",
                found=f"{type(manifest[name]).__name__}" if name in manifest else f"no {name}",
            )
    if manifest["schema"] != SCHEMA:
        raise RecordingError(
            f"{path} was written by another version of bitproof",
            expected=f"schema {SCHEMA}",
            found=f"schema {manifest['schema']}",
            fix="record again with this version",
        )
    for expected, passed in _manifest_checks(manifest):
        if not passed:
            raise RecordingError(f"{path} is no manifest", expected=expected)
    if (found := sha256_of_manifest(manifest)) != manifest["manifest_sha256"]:
        raise RecordingError(
            f"{path} is damaged",
            expected=f"sha256 {manifest['manifest_sha256']} of what it says",
            found=f"sha256 {found}",
            fix="record the system again",
        )
    return Manifest.of(manifest, where=str(path))


def _manifest_checks(manifest: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """What else a manifest must be, so that no later reader works without end."""
    steps, world_size = manifest["steps"], manifest["world_size"]
    is_bearable = steps >= 1 and world_size >= 1 and steps * world_size <= MOST_STEPS_OF_RANKS
    yield f"steps and world_size from 1 on, and {MOST_STEPS_OF_RANKS} at most together", is_bearable
    yield f"values nested {_MAX_DEPTH} deep at most", _is_shallow(manifest, _MAX_DEPTH)
    yield "values, if there, as patterns of tensors", are_patterns(manifest.get("values", []))


def _is_shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (depth > 0 and all(_is_shallow(item, depth - 1) for item in inner))


def _check_file(path: Path, limit: int) -> None:
    """A regular file of bearable size: a pipe would block, and a huge file would exhaust memory."""
    _refuse_link(path)
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


def _refuse_link(path: Path) -> None:
    """A recording lies in its own folder: a link could make it another file's content, or change under the reader."""
    if path.is_symlink():
        raise RecordingError(f"{path} is a symbolic link", expected="a recording whole in its own folder")


def _read_table(path: Path) -> pa.Table:
    """The table, once its schema and its sizes have been seen to be what they should be.

    Batch by batch: what a file says of its size is not to be trusted, and a dictionary of one long name makes a
    small file a huge table.
    """
    _check_file(path, MAX_DIGESTS_BYTES)
    try:
        with pq.ParquetFile(path) as file:
            if not any(map(file.schema_arrow.equals, (*_WITHOUT, _FIRST_COLUMNS))):
                found = ", ".join(f"{field.name}: {field.type}" for field in file.schema_arrow)
                expected = ", ".join(f"{field.name}: {field.type}" for field in COLUMNS)
                raise RecordingError(f"{path} has the wrong columns", expected=expected, found=found)
            if file.metadata.num_rows > MAX_ROWS:
                raise RecordingError(f"{path} is too large", found=f"{file.metadata.num_rows} rows")
            batches, num_bytes = [], 0
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):  # the host forks
                batches.append(batch)
                num_bytes += batch.nbytes
                if num_bytes > MAX_DIGESTS_BYTES:
                    raise RecordingError(f"{path} is too large", expected=f"{MAX_DIGESTS_BYTES} bytes at most")
            table = pa.Table.from_batches(batches, schema=file.schema_arrow)
        for name in OPTIONAL[1:]:
            if name not in table.column_names:
                table = table.append_column(COLUMNS.field(name), pa.nulls(len(table), pa.string()))
        table = table.cast(COLUMNS)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return table


def _damaged(path: Path, error: BaseException) -> RecordingError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return RecordingError(
        f"{path} is damaged", found=f"{type(error).__name__}: {reason}", fix="record the system again"
    )
