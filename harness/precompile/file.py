r"""Writes and reads the files of a precompiled step: a line with the sha256 of the rest, then compressed JSON.

    DIR/step.bitproof        bitproof precompiled step 1 <sha256>\n<zlib of JSON>
    DIR/compiled.bitproof    the same form, if Inductor compiled the step; the other file has its sha256

The hash detects damage, not forgery, so the reader must check the JSON's content. Nothing read here is executed.

A file appears as a whole or not at all. The writer first replaces an old file by a note, so that an old step is never
mistaken for the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from bitproof.harness.errors import ArtifactError
from bitproof.harness.files.plain_files import most_unpacked, read_plain

NAME = "step.bitproof"
COMPILED = "compiled.bitproof"
MAX_BYTES = 1 << 28
"""The maximum size of a file, and of its unpacked JSON: a small file of compressed zeros could unpack to any size."""

_KIND = b"bitproof precompiled step "
_HEAD = _KIND + b"1 "
_UNFINISHED = _KIND + b"unfinished\n"
_HASH_LETTERS = 64
_MAX_WHY = 2000
_CALLED = {NAME: "precompiled step", COMPILED: "precompiled step's compiled code"}

Json = Any
"""A value that `json` can write and read back."""


class Read(NamedTuple):
    """The content of a file: its JSON value, the sha256 of the compressed JSON, and the file's size in bytes."""

    value: Json
    content: str
    num_bytes: int


def begin(folder: Path, what: str) -> None:
    """Prepare a folder for a new precompiled step: delete an old step, and write a note that the step is unfinished.

    `what` is the case's name, for later errors. Raises ArtifactError if the folder cannot be written, or has a file
    `step.bitproof` or `compiled.bitproof` that bitproof did not write.
    """
    # For the error below, until the loop sets it.
    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Check both files before either is replaced.
        for file in (folder / COMPILED, folder / NAME):
            if file.exists() and not _read_bytes(file).startswith(_KIND):
                raise ArtifactError(
                    "a file that is no precompiled step stands in the way",
                    expected="a folder of its own, or one with a precompiled step to replace",
                    found=str(file),
                    fix="choose another --out, or move that file away",
                )
        note_unfinished(folder, what, "it is being made, or its maker was stopped")
        (folder / COMPILED).unlink(missing_ok=True)
    except OSError as error:
        raise _unreadable(file, error, "written") from error


def note_unfinished(folder: Path, what: str, why: str) -> None:
    """Replace the step by a note that states `why` there is no step. `read` then raises an error with this reason.

    `what` is the case's name.
    """
    _write_whole(folder / NAME, _UNFINISHED + json.dumps([what, why[:_MAX_WHY]]).encode())


def write(folder: Path, value: Json, name: str = NAME) -> Read:
    """Write `value` as the file `name` of a folder, as a whole or not at all. Raises ArtifactError if that fails."""
    # Constants of a graph may be infinite or NaN. The reader is Python's JSON parser, which accepts them.
    body = zlib.compress(json.dumps(value, separators=(",", ":"), allow_nan=True).encode(), 1)
    content = hashlib.sha256(body).hexdigest()
    packed = _HEAD + content.encode() + b"\n" + body
    try:
        _write_whole(folder / name, packed)
    except OSError as error:
        raise _unreadable(folder / name, error, "written") from error
    return Read(value, content, len(packed))


def read(folder: Path, name: str = NAME) -> Read:
    """Read the file `name` of a folder, and check its first line and its sha256.

    Raises ArtifactError if the file is missing, unfinished, damaged, or not a precompiled step.
    """
    file, called = folder / name, _CALLED[name]
    try:
        packed = _read_bytes(file)
    except FileNotFoundError:
        raise ArtifactError(f"there is no {called}", expected=f"a file {name}", where=str(folder)) from None
    except OSError as error:
        raise _unreadable(file, error, "read") from error
    # Before the header check, for an error that says why the step is missing.
    if packed.startswith(_UNFINISHED):
        raise _unfinished(packed, file)
    if not packed.startswith(_HEAD):
        raise ArtifactError(
            "the file is no precompiled step",
            expected=f"a file that begins with {_HEAD.decode()!r}",
            found=repr(packed[: len(_HEAD)]),
            where=str(file),
        )
    # The rest of the first line is the sha256 of the body.
    end = len(_HEAD) + _HASH_LETTERS
    stated, body = packed[len(_HEAD) : end], packed[end + 1 :]
    content = hashlib.sha256(body).hexdigest()
    if stated != content.encode() or packed[end : end + 1] != b"\n":
        raise ArtifactError(
            f"the {called} is damaged",
            expected=f"a body of sha256 {stated.decode(errors='replace')}, as its first line says",
            found=content,
            where=str(file),
        )
    try:
        return Read(json.loads(_unpacked(body)), content, len(packed))
    except (ValueError, zlib.error, RecursionError) as error:
        raise ArtifactError(f"the {called} holds no JSON", found=str(error), where=str(file)) from error


def _unpacked(body: bytes) -> bytes:
    # The limit comes before the content is parsed: a few bytes could unpack to gigabytes.
    packed, most = zlib.decompressobj(), min(MAX_BYTES, most_unpacked(len(body)))
    content = packed.decompress(body, most)
    if not packed.eof or packed.unused_data:
        raise ValueError(f"it is cut short, goes on behind its end, or is larger than {most} bytes")
    return content


def _unfinished(packed: bytes, file: Path) -> ArtifactError:
    what, why = "a case", "the note that stands in its place is damaged"
    # A damaged note still shows that the step is unfinished.
    with contextlib.suppress(ValueError, TypeError):
        what, why = map(str, json.loads(packed[len(_UNFINISHED) :]))
    return ArtifactError(
        f"the precompiled step of {what} was not finished, and what was there before is not used in its place",
        expected="a precompile command that finished",
        found=why,
        where=str(file),
    )


def _unreadable(file: Path, error: OSError, done: str) -> ArtifactError:
    return ArtifactError(
        f"the {_CALLED[file.name]} cannot be {done}", found=error.strerror or str(error), where=str(file)
    )


def _read_bytes(file: Path) -> bytes:
    # Refuses a pipe or device, which might never end, and a file that is too large.
    return read_plain(file, MAX_BYTES)


def _write_whole(file: Path, content: bytes) -> None:
    handle, partial = tempfile.mkstemp(dir=file.parent, prefix=".partial-")
    try:
        with open(handle, "wb") as opened:
            # A reader sees the old file or the whole new file, even after a crash.
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        # `mkstemp` makes files that only their owner can read.
        os.chmod(partial, 0o644)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
