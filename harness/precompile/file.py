"""The file of a precompiled step: a line that says what it is, with the sha256 of all that follows; then JSON, packed.

    DIR/step.bitproof    bitproof precompiled step 1 <sha256>\\n<zlib of JSON>

Every byte counts: the line must be this very line, and the hash covers the rest. Nothing that is read is executed here.
A hash shows damage, not a forger, who can hash what he wrote: what the JSON may say is the reader's business.

A file appears whole or not at all. Whoever makes one puts a note in its place first, so that what was there before is
never taken for what could not be made.
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

from harness.errors import ArtifactError

NAME = "step.bitproof"
MAX_BYTES = 1 << 32
"""How large the JSON may be: a file of zeros, packed, could say that it is as large as any memory."""

_KIND = b"bitproof precompiled step "
_HEAD = _KIND + b"1 "
_UNFINISHED = _KIND + b"unfinished\n"
_HASH_LETTERS = 64
_MAX_WHY = 2000

Json = Any
"""What `json` writes and reads as it is."""


class Read(NamedTuple):
    """What a file says, the sha256 of its body, and its size in bytes."""

    value: Json
    content: str
    num_bytes: int


def begin(folder: Path, what: str) -> None:
    """Make the folder, and put in a file's place the note that it is being made. `what` is of which case.

    Raises ArtifactError for something of that name that is no precompiled step, which stays, and for a folder that
    cannot be written.
    """
    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.exists() and not _content(file).startswith(_KIND):
            raise ArtifactError(
                "a file that is no precompiled step stands in the way",
                expected="a folder of its own, or one with a precompiled step to replace",
                found=str(file),
                fix="choose another --out, or move that file away",
            )
        note_unfinished(folder, what, "it is being made, or whoever made it was stopped")
    except OSError as error:
        raise _unreadable(file, error, "written") from error


def note_unfinished(folder: Path, what: str, why: str) -> None:
    """Say in a file's place why there is none."""
    _put(folder, _UNFINISHED + json.dumps([what, why[:_MAX_WHY]]).encode())


def write(folder: Path, value: Json) -> Read:
    """Write the file, whole or not at all. Raises ArtifactError where that fails."""
    body = zlib.compress(json.dumps(value, separators=(",", ":"), allow_nan=True).encode(), 1)
    content = hashlib.sha256(body).hexdigest()
    packed = _HEAD + content.encode() + b"\n" + body
    try:
        _put(folder, packed)
    except OSError as error:
        raise _unreadable(folder / NAME, error, "written") from error
    return Read(value, content, len(packed))


def read(folder: Path) -> Read:
    """What the file says. Raises ArtifactError for none, an unfinished, a foreign and a damaged one."""
    file = folder / NAME
    try:
        packed = _content(file)
    except FileNotFoundError:
        raise ArtifactError("there is no precompiled step", expected=f"a file {NAME}", where=str(folder)) from None
    except OSError as error:
        raise _unreadable(file, error, "read") from error
    if packed.startswith(_UNFINISHED):
        raise _unfinished(packed, file)
    if not packed.startswith(_HEAD):
        raise ArtifactError(
            "the file is no precompiled step",
            expected=f"a file that begins with {_HEAD.decode()!r}",
            found=repr(packed[: len(_HEAD)]),
            where=str(file),
        )
    end = len(_HEAD) + _HASH_LETTERS
    told, body = packed[len(_HEAD) : end], packed[end + 1 :]
    content = hashlib.sha256(body).hexdigest()
    if told != content.encode() or packed[end : end + 1] != b"\n":
        raise ArtifactError(
            "the precompiled step is damaged",
            expected=f"a body of sha256 {told.decode(errors='replace')}, as its first line says",
            found=content,
            where=str(file),
        )
    try:
        return Read(json.loads(_unpacked(body)), content, len(packed))
    except (ValueError, zlib.error, RecursionError) as error:
        raise ArtifactError("the precompiled step holds no JSON", found=str(error), where=str(file)) from error


def _unpacked(body: bytes) -> bytes:
    packed = zlib.decompressobj()
    content = packed.decompress(body, MAX_BYTES)
    if not packed.eof or packed.unused_data:
        raise ValueError(f"it is cut short, goes on behind its end, or is larger than {MAX_BYTES} bytes")
    return content


def _unfinished(packed: bytes, file: Path) -> ArtifactError:
    what, why = "a case", "the note that stands in its place is damaged"
    with contextlib.suppress(ValueError, TypeError):
        what, why = map(str, json.loads(packed[len(_UNFINISHED) :]))
    return ArtifactError(
        f"the precompiled step of {what} was not finished, and what was there before is not used in its place",
        expected="a precompile that came to its end",
        found=why,
        where=str(file),
    )


def _unreadable(file: Path, error: OSError, done: str) -> ArtifactError:
    return ArtifactError(f"the precompiled step cannot be {done}", found=error.strerror or str(error), where=str(file))


def _content(file: Path) -> bytes:
    return file.read_bytes()


def _put(folder: Path, content: bytes) -> None:
    """Put content in the file's place at once."""
    handle, partial = tempfile.mkstemp(dir=folder, prefix=".partial-")
    try:
        with open(handle, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, folder / NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
