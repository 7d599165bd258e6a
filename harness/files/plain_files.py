"""Read files that a user names: only regular files, up to a given size.

Other files raise OSError, whose `strerror` says which kind of file it is:

- A pipe or a terminal would block, as in `--case <(make_case)`.
- A device such as /dev/zero never ends.
- Some files of /proc have size 0 and terabytes of content.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SOURCE = 1 << 26
"""The default limit, in bytes: no hand-written Python or JSON file is larger."""

UNPACKED = 1 << 24
"""The size, in bytes, to which any packed file may unpack, even the smallest."""

_MOST_TIMES = 300
"""How many times its own size a packed file may unpack to.

Measured: lists of calls of up to 200 equal layers unpacked to 17 to 20 times their size, and to 58 to 78 times if all
digests are equal, as for zeros. zlib packs zeros to a thousandth.
"""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_BLOCK = 1 << 20


def read_plain(path: Path | str, most: int = SOURCE) -> bytes:
    """Return the content of a regular file. Raises OSError for any other file, and for more than `most` bytes."""
    check_plain(path, most)
    # O_NONBLOCK: if a pipe has taken the file's place, opening it must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path, most)  # the file may have been replaced since the first check
        # A byte more than allowed, to notice a file that has grown since the check.
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
    """Return the largest allowed size of unpacked content, given the size of the packed content.

    Without a limit, a small file could fill the memory: 260 KB of zlib unpack to 256 MiB of `[],[],[],`.
    """
    return max(UNPACKED, _MOST_TIMES * packed)


def check_plain(path: Path | str, most: int | None = None) -> None:
    """Raise OSError if a path is not a regular file, or if the file has more than `most` bytes.

    To be called before another program or library reads the file.
    """
    # The file is not opened, because opening a device can have effects.
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
