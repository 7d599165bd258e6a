"""Copies files from an untrusted folder. Only real folders and regular files are copied, and links are ignored.

- No link leads out of the folder, even if it is created during the copy: each file is opened relative to its open
  parent folder.
- Pipes, sockets and devices are never opened.
- Files are copied, not hard-linked, so that a later change to an original does not change its copy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bitproof.harness.errors import RecordingError

_NO_LINKS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_DEPTH = 50
_BLOCK = 1 << 20


@dataclass
class CopyCapacity:
    """How many more bytes and entries may be copied; an entry is a file or a folder.

    The limit protects against a huge untrusted folder.
    """

    # Generous: a run of hundreds of cases that stores all values takes about 1% of it.
    num_bytes: int = 64 << 30
    entries: int = 1_000_000

    def take(self, num_bytes: int, what: Path) -> None:
        self.num_bytes -= num_bytes
        self.entries -= 1
        if self.num_bytes < 0 or self.entries < 0:
            raise RecordingError(
                "a shard's files are too large to copy",
                expected=f"{CopyCapacity.num_bytes >> 30} GiB and {CopyCapacity.entries:,} files at most",
                found=f"more, at {what}",
                fix="leave out what is not a run's, or merge folders that hold nothing but report.json",
            )


@contextmanager
def opened_folder(path: Path) -> Iterator[int | None]:
    """Context with the file descriptor of a folder; None if the path is missing or not a folder.

    A link to a folder does not count as a folder, but links in the parents of the path are followed.
    """
    with _opened(path.name, None, path, stat.S_IFDIR) as folder:
        yield folder


def copy_folder(parent: int, name: str, target: Path, room: CopyCapacity, depth: int = _MAX_DEPTH) -> None:
    """Copy the folder `name` from the open folder `parent` to `target`. Does nothing if `name` is not a folder.

    `parent` is a file descriptor. `room` limits the copied bytes and entries, and `depth` the levels of folders.
    """
    with _opened(name, parent, target, stat.S_IFDIR) as folder:
        # Deeper folders are left out: no run makes them, and a forged tree could exhaust the stack.
        if folder is None or depth == 0:
            return
        # An empty folder takes no bytes, but millions of them would fill a disk: entries count, too.
        room.take(0, target)
        target.mkdir(parents=True)
        for entry in sorted(os.listdir(folder)):
            # Each of the two ignores entries of the other's kind.
            copy_file(folder, entry, target / entry, room)
            copy_folder(folder, entry, target / entry, room, depth - 1)


def copy_file(parent: int, name: str, target: Path, room: CopyCapacity) -> None:
    """Copy the file `name` from the open folder `parent` to `target`. Does nothing if `name` is not a regular file."""
    with _opened(name, parent, target, stat.S_IFREG) as file:
        if file is None:
            return
        size = os.fstat(file).st_size
        room.take(size, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Never over an existing file: two shards must not share one.
        with target.open("xb") as copy:
            # Never more than the size that was counted, even if the file grows meanwhile.
            while size > 0 and (block := os.read(file, min(size, _BLOCK))):
                copy.write(block)
                size -= len(block)


@contextmanager
def _opened(name: str, parent: int | None, entry_path: Path, kind: int) -> Iterator[int | None]:
    """Context with the file descriptor of the entry `name` in the open folder `parent`.

    The descriptor is None unless the entry exists and has this `kind`, such as `stat.S_IFDIR`. Without a `parent`,
    `entry_path` is opened. Errors name `entry_path` in either case.
    """
    # Only an entry of the right kind is opened at all: opening a pipe may block, and a device may act.
    path = str(entry_path) if parent is None else name
    try:
        found = os.stat(path, dir_fd=parent, follow_symlinks=False)
        entry = os.open(path, _NO_LINKS, dir_fd=parent) if stat.S_IFMT(found.st_mode) == kind else None
    except FileNotFoundError:
        entry = None
    except OSError as error:
        raise RecordingError("a shard's file cannot be read", found=f"{error.strerror}: {entry_path}") from error
    if entry is None:
        yield None
        return
    try:
        # Checked again on the open descriptor: the entry may have been replaced after `stat`.
        yield entry if stat.S_IFMT(os.fstat(entry).st_mode) == kind else None
    finally:
        os.close(entry)
