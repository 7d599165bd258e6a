"""A command's temporary folder. One that was killed leaves its own behind, and the next command removes that.

Whose maker lives, its lock says: the system lets go of a lock when a process is gone, however it ended. A folder
without a lock file of ours, another user's, or a link is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "bitproof-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")  # as tempfile makes them
_LOCK = ".lock"
_locks: dict[Path, int] = {}


def make_work_folder() -> Path:
    """A new temporary folder, until `remove_work_folder` or this process's end; those of the dead are removed."""
    _remove_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    unnamed = folder / f"{_LOCK}-made"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: no other process can take it either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / _LOCK)  # from its first moment under this name it is locked
    _locks[folder] = lock
    return folder


def remove_work_folder(folder: Path) -> None:
    """Remove a folder that `make_work_folder` made, with what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry)


def _remove_if_dead(entry: os.DirEntry[str]) -> None:
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    lock = os.open(Path(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while its maker lives
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)
