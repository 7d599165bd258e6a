"""Write and read a recording's folder: manifest.json, digests.parquet and, in values/, selected tensors of each rank.

- A recording is written to a hidden folder, which is renamed at the end. So it appears as a whole or not at all.
- No file is trusted when it is read: types, names, ranges and sizes are checked. A RecordingError names the file.
- The manifest has the sha256 of every other file, and of its own content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from bitproof.harness.capture.columns import column
from bitproof.harness.capture.digest_table import COLUMNS
from bitproof.harness.capture.selection import are_patterns
from bitproof.harness.capture.stored import (
    OF_LAYOUTS,
    DigestFile,
    check_file,
    damaged,
    empty_layout_columns,
    read_rows,
    refuse_link,
)
from bitproof.harness.case.bounds import MOST_STEPS_OF_RANKS
from bitproof.harness.errors import RecordingError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.records import SCHEMA, KeptCalls, Key, Manifest, Record, Recording
from bitproof.harness.runtime.exchange import UNSUPPORTED, exchange

A = TypeVar("A")

MANIFEST = "manifest.json"
DIGESTS = "digests.parquet"
VALUES = "values"
CALLS = "calls"

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
_MAX_VALUES_BYTES = 1 << 40
MAX_CALLS_BYTES = 1 << 30
_MAX_DEPTH = 50
HELD_BYTES = 32 << 20
_MOST_ATTEMPTS = 1000
_READ_SECONDS = 10.0
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{16}\.old")
_DICTIONARY_COLUMNS = ["kind", "name", "dtype", "shape.list.element", "content", "placements", "box"]
"""Columns that are dictionary-encoded. Digests are not, as hardly any digest repeats."""


def write_recording(folder: Path, manifest: Manifest, rows: Iterable[tuple[Key, Record]]) -> None:
    """Write a recording to `folder`; an earlier recording there is replaced. Rows keep their order."""
    table = _table(rows)
    _write_folder(folder, manifest, [table], empty_layout_columns(table))


def join_parts(folder: Path, manifest: Manifest, parts: Iterable[Path], values: Sequence[Path] = ()) -> None:
    """Join the files of ranks into a recording in `folder`.

    - `parts`: each rank's file of rows, in the order of ranks.
    - `values`: each rank's file of tensor values, which is moved into the folder. Empty if no values were kept.
    """
    # If the parts are large, only a single part at a time is in memory, and each becomes a row group of the recording.
    parts = list(parts)
    tables: Iterable[pa.Table] = (DigestFile(part).table() for part in parts)
    if sum(part.stat().st_size for part in parts) <= HELD_BYTES:
        whole = pa.concat_tables(tables)
        tables, empty = [whole], empty_layout_columns(whole)
    else:
        # The parts are read twice: the columns to leave out must be known before the first table is written.
        empty = set.intersection(*(empty_layout_columns(DigestFile(part).table()) for part in parts))
    _write_folder(folder, manifest, tables, empty, values)


def checked_values_path(folder: Path, manifest: Manifest, rank: int) -> Path:
    """Return the path of a rank's file of values. Raises RecordingError if its sha256 differs from that in the
    manifest.
    """
    path = _values_path(folder, rank)
    known = manifest.values_sha256
    if known is None or len(known) != manifest.world_size:
        raise RecordingError(
            f"{folder} holds no values",
            expected=f"values of {manifest.world_size} ranks, which a case with a bound records",
            fix="record the system again, with --values or a bound in the case",
        )
    # The folder could be a link as well as the file.
    refuse_link(path.parent)
    check_file(path, _MAX_VALUES_BYTES)
    if (found := _sha256(path)) != known[rank]:
        raise RecordingError(
            f"{path} is damaged, or not the one that {MANIFEST} was written with",
            expected=f"sha256 {known[rank]}",
            found=f"sha256 {found}",
            fix="record the system again",
        )
    return path


def add_calls(folder: Path, step: int, logs: Sequence[bytes]) -> None:
    """Write the logs of a step's operator calls, a file per rank, into a recording's folder, and list them in its
    manifest.
    """
    with _writing(folder):
        (folder / CALLS).mkdir()
        for rank, content in enumerate(logs):
            _calls_path(folder, rank).write_bytes(content)
    sums = [_sha256(_calls_path(folder, rank)) for rank in range(len(logs))]
    # The manifest is changed last: logs that it does not name are ignored.
    restate(folder, calls=KeptCalls(step=step, sha256=sums))


def restate(folder: Path, **facts: Any) -> None:
    """Change fields of the manifest of a finished recording. `facts` maps fields to new values."""
    about = {"schema": SCHEMA} | replace(read_manifest(folder), **facts).to_dict()
    about["manifest_sha256"] = sha256_of_manifest(about)
    # Readers see the old manifest or the new, never a part.
    partial = folder / f".{MANIFEST}.{os.getpid()}.partial"
    with _writing(folder):
        partial.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(folder / MANIFEST)


def checked_calls_path(folder: Path, manifest: Manifest, rank: int) -> Path:
    """Return the path of a rank's log of calls. Raises RecordingError if its sha256 differs from that in the
    manifest.
    """
    path = _calls_path(folder, rank)
    if manifest.calls is None or len(manifest.calls.sha256) != manifest.world_size:
        raise RecordingError(f"{folder} holds no log of calls of each rank")
    refuse_link(path.parent)
    check_file(path, MAX_CALLS_BYTES)
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
    """Write a rank's rows to a file, which appears as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    pq.write_table(_table(rows), partial, compression="zstd", use_dictionary=_DICTIONARY_COLUMNS)
    partial.replace(path)


def read_recording(folder: Path) -> Recording:
    """Read and check a recording's manifest and digests. Values are checked later, when they are read.

    Raises RecordingError if anything is missing, damaged or hostile.
    """
    folder = Path(folder)

    def read() -> Recording:
        manifest = _read_manifest(folder)
        return read_rows(DigestFile(folder / DIGESTS, manifest.digests_sha256), manifest)

    return _read_again_if_replaced(folder, read)


def put_in_place(new: Path, folder: Path, *, replaces: bool = True) -> None:
    """Rename the finished folder `new` to `folder`; an old folder of this name is replaced.

    If the operating system can exchange folders, `folder` exists at every moment. Without `replaces`, raises
    FileExistsError if `folder` exists.
    """
    # `rename` fails if a folder of that name exists and is not empty. Then the two are exchanged in a single operation.
    # Another process may remove the folder in between, so both are tried again.
    for _ in range(_MOST_ATTEMPTS):
        try:
            os.rename(new, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not replaces:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder)) from error
        else:
            return
        with suppress(FileNotFoundError):  # another process has just taken the old folder away to replace it
            try:
                # Afterwards the old folder is at `new`, to be removed.
                exchange(new, folder)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                if not _replaced_in_two_steps(new, folder):
                    continue
            else:
                _remove(new)
            return
    raise FileExistsError(errno.EBUSY, "other processes replace it all the time", str(folder))


def put_aside(name: str) -> str | None:
    """Return the original name of a hidden folder that an interrupted replacement left behind; None if `name` is
    another name."""
    found = _ASIDE.fullmatch(name)
    return found and found[1]


def _replaced_in_two_steps(new: Path, folder: Path) -> bool:
    # If the process ends between the two renames, `put_aside` recognizes the old folder by this name.
    old = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.old")
    os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # another process was faster
            _remove(old)
            return False
        # The old folder must not get lost because of another error, such as a missing permission.
        os.rename(old, folder)
        raise
    _remove(old)
    return True


def _remove(old: Path) -> None:
    if old.is_symlink() or not old.is_dir():
        old.unlink(missing_ok=True)
    else:
        shutil.rmtree(old, ignore_errors=True)


def _read_again_if_replaced(folder: Path, read: Callable[[], A]) -> A:
    # The first attempt may have read some files of the old folder and some of the new.
    until = time.monotonic() + _READ_SECONDS
    while True:
        # A folder that is replaced during the read has another inode afterwards.
        before = _identity(folder)
        try:
            return read()
        except RecordingError:
            if before == _identity(folder) or time.monotonic() > until:
                raise


def _identity(folder: Path) -> tuple[int, ...]:
    try:
        found = os.stat(folder)
    except OSError:
        return ()
    return found.st_ino, found.st_ctime_ns, found.st_mtime_ns


def warm_up() -> None:
    """Load the libraries for writing and reading tables now. Otherwise each forked rank would load them."""
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
    return list(zip(*rows, strict=True)) or [()] * len(kind._fields)


def _values_path(folder: Path, rank: int) -> Path:
    return folder / VALUES / f"rank{rank}.safetensors"


def _write_folder(
    folder: Path, manifest: Manifest, tables: Iterable[pa.Table], empty: Set[str], values: Sequence[Path] = ()
) -> None:
    folder = Path(folder)
    # The random name keeps two writers of the same folder apart.
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    # A recording without layouts lacks their columns, as older recordings do. Only the last columns may be missing.
    left_out = list(takewhile(empty.__contains__, OF_LAYOUTS))
    schema = pa.schema([field for field in COLUMNS if field.name not in left_out])
    with _writing(folder), ExitStack() as after:
        after.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with pq.ParquetWriter(
            partial / DIGESTS, schema, compression="zstd", use_dictionary=_DICTIONARY_COLUMNS
        ) as writer:
            for table in tables:
                # A table is a row group: in a long recording, a rank can then be read without the others.
                writer.write_table(table.drop_columns(left_out), row_group_size=max(len(table), 1))
        about = {"schema": SCHEMA} | manifest.to_dict() | {"digests_sha256": _sha256(partial / DIGESTS)}
        del about["values_sha256"]  # if the manifest was read from another folder, they are about its files
        for rank, source in enumerate(values):
            path = _values_path(partial, rank)
            path.parent.mkdir(exist_ok=True)
            shutil.move(source, path)
            about.setdefault("values_sha256", []).append(_sha256(path))
        about["manifest_sha256"] = sha256_of_manifest(about)
        (partial / MANIFEST).write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        put_in_place(partial, folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordingError(
            "the recording cannot be written",
            found=str(error),
            where=str(folder),
            fix="make room on its disk, or choose a folder on another one with --report-dir",
        ) from error


def _sha256(path: Path) -> str:
    # Parquet files have no checksum: without the hash, a flipped bit would look like a difference of systems.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's contents, independent of the file's formatting."""
    content = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a recording, and no other file.

    Raises RecordingError if it is missing, damaged or hostile.
    """
    return _read_again_if_replaced(folder, lambda: _read_manifest(folder))


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    check_file(path, _MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(read_plain(path, _MAX_MANIFEST_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    if not isinstance(manifest, dict):
        raise RecordingError(f"{path} is no manifest", expected="a JSON object", found=type(manifest).__name__)
    for name, kind in _REQUIRED.items():
        # Not isinstance: for it, True is an int.
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
    # These limits come before the hash, as they also bound the work of hashing.
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
    steps, world_size = manifest["steps"], manifest["world_size"]
    is_bearable = steps >= 1 and world_size >= 1 and steps * world_size <= MOST_STEPS_OF_RANKS
    yield f"steps and world_size from 1 on, and {MOST_STEPS_OF_RANKS} at most together", is_bearable
    yield f"values nested {_MAX_DEPTH} deep at most", _is_shallow(manifest, _MAX_DEPTH)
    yield "values, if there, as patterns of tensors", are_patterns(manifest.get("values", []))


def _is_shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (depth > 0 and all(_is_shallow(item, depth - 1) for item in inner))
