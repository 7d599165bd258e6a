"""A cache of results on disk. A result is stored under a key that states all its inputs, and used only if it is intact.

A file has a sha256, and then the key and the result as JSON. It is used if the sha256 is that of the rest, and the key
is the requested key.

- Nothing read from a file is executed.
- The folder and each file must belong to the user, and no one else may write them. An attacker who can forge a result
  could then also change the code that computes it.
- A file appears as a whole or not at all.
- The folder stays small: the least recently used files are removed first. Files with other names are never removed, as
  they may be the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import zlib
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "BITPROOF_CACHE"
MAX_FILES = 2_000
MAX_BYTES = 1 << 28

MAX_CONTENT = 1 << 26
"""The largest size, in bytes, of a key and its value as JSON. The largest graph of the built-in cases takes 3 MB."""

_HASH_BYTES = 32
_NAME = re.compile(r"bitproof-[a-z-]+-[0-9a-f]{64}|\.bitproof-partial-[A-Za-z0-9_]+")
_OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
}


def default_folder() -> Path | None:
    """Return the default folder of the cache; None if the user has no home and no variable names a folder.

    It is $BITPROOF_CACHE, or else `bitproof` in $XDG_CACHE_HOME, or else `.cache/bitproof` in the home.
    """
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen).absolute()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches).absolute() / "bitproof"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache" / "bitproof"
    return None


def read_cached(folder: Path, kind: str, key: str) -> Any:
    """Return the value that was kept under `kind` and `key`; None if there is none, or if its file is not intact."""
    file = _file(folder, kind, key)
    try:
        if not _is_own(folder):
            return None
        _refuse_irregular(os.lstat(file))  # before it is opened, as opening a device can have effects
        with open(file, "rb", opener=_open_plain) as opened:
            # The opened file is checked again: the path may name another file by now.
            facts = os.fstat(opened.fileno())
            _refuse_irregular(facts)
            if not _is_closed(facts):
                raise ValueError("others may write it, or it is another user's")
            if facts.st_size > MAX_BYTES:
                raise ValueError(f"it is larger than all that is kept: {facts.st_size:,} bytes")
            content = opened.read(MAX_BYTES)
        stated, packed = content[:_HASH_BYTES], content[_HASH_BYTES:]
        if hashlib.sha256(packed).digest() != stated:
            raise ValueError("its hash is not that of its content")
        found = json.loads(_unpacked(packed))
        if found["key"] != key:
            raise ValueError("it was kept under another key")
        # The time of the last use decides which files are removed first.
        os.utime(file, follow_symlinks=False)
        return found["value"]
    except FileNotFoundError:
        return None
    # A bad file is no error: the value is computed again.
    except (OSError, ValueError, KeyError, TypeError, zlib.error, RecursionError, MemoryError) as error:
        logger.warning("%s is not used: %s", file, error)
        return None


def is_kept(folder: Path, kind: str, key: str) -> bool:
    """Whether there is a file for a value under `kind` and `key`. `read_cached` may still find it not intact."""
    return os.path.lexists(_file(folder, kind, key))


def keep(folder: Path, kind: str, key: str, value: Any) -> bool:
    """Keep a value that JSON can represent, under `kind` and `key`. Returns whether it was kept."""
    file = _file(folder, kind, key)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            return False
        with contextlib.suppress(FileNotFoundError):
            # `os.replace` would silently replace a link or a pipe.
            _refuse_irregular(os.lstat(file))
        content = json.dumps({"key": key, "value": value}).encode()
        if len(content) > MAX_CONTENT:
            raise ValueError(f"it takes {len(content):,} bytes, more than the {MAX_CONTENT:,} that are read again")
        # Level 1, since speed matters here more than size.
        packed = zlib.compress(content, 1)
        handle, partial = tempfile.mkstemp(dir=folder, prefix=".bitproof-partial-")  # mode 0600, guaranteed by mkstemp
        try:
            with open(handle, "wb") as opened:
                opened.write(hashlib.sha256(packed).digest() + packed)
            # Atomic: readers see the old file or the new, never a part.
            os.replace(partial, file)
        # Also after an interrupt, so that no partial file is left.
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        _make_room(folder)
    except (OSError, TypeError, ValueError) as error:
        logger.warning("%s was not kept: %s", file, error)
        return False
    return True


def _file(folder: Path, kind: str, key: str) -> Path:
    return folder / f"bitproof-{kind}-{hashlib.sha256(key.encode()).hexdigest()}"


def _refuse_irregular(facts: os.stat_result) -> None:
    # This cache writes regular files only.
    if not stat.S_ISREG(facts.st_mode):
        kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "no plain file")
        raise ValueError(f"it is {kind}")


def _open_plain(file: str, flags: int) -> int:
    # Fails for a symbolic link, and does not wait for the writer of a pipe.
    return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)


def _unpacked(packed: bytes) -> bytes:
    # A few bytes could expand to more than the machine's memory.
    unpacking = zlib.decompressobj()
    content = unpacking.decompress(packed, MAX_CONTENT)
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise ValueError(f"its content is cut short, or takes more than {MAX_CONTENT:,} bytes")
    return content


def _is_own(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        facts = os.lstat(folder)
        if stat.S_ISDIR(facts.st_mode) and _is_closed(facts):
            return True
        logger.warning("nothing is kept in %s: it is no folder of this user's alone", folder)
    return False


def _is_closed(facts: os.stat_result) -> bool:
    return facts.st_uid == os.geteuid() and not facts.st_mode & _OPEN_TO_OTHERS


def _make_room(folder: Path) -> None:
    files: list[tuple[os.stat_result, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                # Also partial files of killed writers.
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    files.append((entry.stat(follow_symlinks=False), entry.path))
    # `read_cached` sets the time of a file that it uses, so this is the order of last uses.
    files.sort(key=lambda found: found[0].st_mtime, reverse=True)
    size = 0
    for number, (facts, path) in enumerate(files):
        size += facts.st_size
        if number >= MAX_FILES or size > MAX_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(path)
