"""Files that a user names, read: regular files alone, and no more of them than a reader can bear.

A pipe would block until another process writes, a terminal until a key is pressed, and a device such as /dev/zero never
ends; some files of /proc say that they are empty and go on for terabytes. All of these are refused with OSError, whose
`strerror` says what the path is. Example: `--case <(make_case)` is a pipe; write the case into a file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SOURCE = 1 << 26
"""Bytes: the most that is read of a Python or JSON file. None that is written by hand is larger."""

UNPACKED = 1 << 24
"""Bytes: any packed file may hold as many unpacked, however few bytes it has itself."""

_MOST_TIMES = 300
"""Lists of calls of up to 200 alike layers, made for a measurement, were 17 to 20 times as large unpacked, and 58 to 78
times if all digests are alike, as of zeros. zlib packs zeros to a thousandth."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_BLOCK = 1 << 20


def read_plain(path: Path | str, most: int = SOURCE) -> bytes:
    """What a regular file of at most this many bytes holds. Raises OSError for anything else."""
    check_plain(path, most)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path, most)  # what was looked at before may have been replaced
        blocks, left = [], most + 1
        while left > 0 and (block := os.read(descriptor, min(left, _BLOCK))):
            blocks.append(block)
            left -= len(block)
        if left <= 0:
            raise _too_large(path, most)
        return b"".join(blocks)
    finally:
        os.close(descriptor)


def most_unpacked(packed: int) -> int:
    """The most bytes that so many packed bytes may hold. More is refused: a small file could fill the memory.

    Example: 260 KB of zlib hold 256 MiB of `[],[],[],`, and JSON makes far more of it.
    """
    return max(UNPACKED, _MOST_TIMES * packed)


def check_plain(path: Path | str, most: int | None = None) -> None:
    """Raise OSError unless there is a regular file, for what another program or library reads.

    Looks without opening it: that alone does something to a device.
    """
    try:
        _check(os.stat(path), path, most)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _check(found: os.stat_result, path: Path | str, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    if most is not None and found.st_size > most:
        raise _too_large(path, most)


def _too_large(path: Path | str, most: int) -> OSError:
    return OSError(errno.EFBIG, f"more than {most} bytes", str(path))
