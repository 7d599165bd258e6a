"""The temporary folder of a command. If the command is killed, the next command removes its folder.

A folder is removed only if it has a valid marker that is not locked. A marker is a file that the command writes and
keeps locked. It states the folder's name and inode, and the machine and boot in which it was made.

- A copied marker is invalid, because it states another folder.
- A marker from another machine is invalid, because its lock may be unknown here.
- A locked marker shows that its command still runs. The system releases the lock when the command ends for any reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "bitproof-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")  # as tempfile makes them
_MARKER = ".bitproof-made-this"
_MADE_BY = "bitproof: a command's temporary folder"
_MAX_BYTES = 4096
BOOT = Path("/proc/sys/kernel/random/boot_id")
_locks: dict[Path, int] = {}


def make_work_folder() -> Path:
    """Make a temporary folder, which lasts until `remove_work_folder`. Also removes the folders of killed commands."""
    _remove_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    unnamed = folder / f"{_MARKER}-yet"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks, or a full disk: the folder is never removed
        marker = _marker(folder.name, os.stat(folder))
        if marker is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, json.dumps(marker | {"pid": os.getpid()}).encode())
            unnamed.rename(folder / _MARKER)  # under this name the marker is complete and locked from the first moment
    _locks[folder] = lock
    return folder


def remove_work_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    # Unlocked only now, so that no other command removes the folder at the same time.
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError, ValueError, RecursionError):
                    _remove_if_dead(entry)


def _remove_if_dead(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    # Another user may have put a link or a pipe there: neither is followed or waited for.
    lock = os.open(Path(entry.path, _MARKER), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(lock)
        # A file with two names may be another user's or another folder's marker.
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_nlink != 1:
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while its maker lives
        said, expected = json.loads(os.read(lock, _MAX_BYTES)), _marker(entry.name, found)
        if expected is None or not isinstance(said, dict) or {name: said.get(name) for name in expected} != expected:
            return
        # The folder may have been replaced since it was found.
        if os.path.samestat(found, os.lstat(entry.path)):
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)


def _marker(name: str, folder: os.stat_result) -> dict[str, object] | None:
    """Return the content of a marker for the folder called `name`; None if this machine does not identify its boot."""
    try:
        boot = BOOT.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if not boot:
        return None
    # A copy of the marker elsewhere, or a marker from before a restart, differs in at least one of these.
    return {
        "made_by": _MADE_BY,
        "folder": name,
        "inode": folder.st_ino,
        "host": os.uname().nodename,
        "boot": boot,
    }
