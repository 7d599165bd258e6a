"""Refuses a script whose run depends on a file that an earlier run of the same comparison wrote.

    reference    tokens.pt does not exist: the script tokenizes, and writes it
    candidate    torch.load("tokens.pt")                                          refused

All runs have the same working directory, so a later run finds the files of earlier runs. It may overwrite these files,
but must not depend on them:

1. If Python opens such a file to read it, the script is refused at once.
2. If another program or library reads the file, inotify reports this, and the script is refused at its end.
3. If the script asks whether the file exists, or passes its name to a program, it is refused at its end. It is accepted
   if the run then writes the file.

A file counts as an earlier run's if it changed between the start of the first run and the start of this run, and its
content differs from before the first run. The working directory, the script's folder, and files that Python wrote
elsewhere are watched.

Not noticed: listing a folder, missing a file that an earlier run removed, reading the time of an unchanged file, files
that other programs write outside the watched folders, and a program that appends to a file before another reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.within_user_code import refused, refusing

OUT = "{out}"
"""Placeholder in a script's arguments for the run's own output folder."""

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_NOT_WATCHED = {".git", "__pycache__"}
_MOST_FILES = 200_000
"""Most files and folders that are examined below the watched folders; shallow files come first."""

_STARTS = {"subprocess.Popen": 1, "os.system": 0, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2}
"""Audit events that start a program -> index of the argument with its command line."""

_CHANGES = ("os.remove", "os.truncate", "os.utime", "os.chmod", "os.chown")
"""Audit events that change a file's content or times. Their first argument is its path."""

_BREAKS = re.compile(r"[\s=:,;'\"<>|&()]+")

_MOST_BYTES = 64 << 20
"""Largest file whose content before the first run is hashed."""

_READ, _MODIFIED, _WRITTEN, _LOOKED, _OPENED = 0x1, 0x2, 0x8, 0x10, 0x20
"""inotify's events for a file: read, modified, closed after writing, closed after reading only, opened."""

_FILES = {"open", "sqlite3.connect", "os.mkdir", "os.rename", "os.link", "os.symlink", *_CHANGES, *_STARTS}
"""Audit events about files. torch causes thousands of other events while it traces a step."""

_Identity = tuple[int, int]

_RUNNING: list[RunFiles] = []


@functools.cache
def _listen() -> None:
    # Python cannot remove an audit hook.
    sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    # The hook stays for the whole process, so it must be fast outside a run.
    if _RUNNING and event in _FILES:
        # A copy, as another thread may enter or leave a run meanwhile.
        for files in [*_RUNNING]:
            files.heard(event, args)


class _Began(NamedTuple):
    """Start times of the case's first run and of this run, in nanoseconds of the file system's clock."""

    first: int
    this: int

    def is_between(self, found: os.stat_result) -> bool:
        """Return whether a file was changed after the start of the first run and before the start of this run."""
        # Both are needed: `touch` and `cp -p` can set an mtime to any time, but then the ctime shows the change.
        return any(self.first <= when < self.this for when in (found.st_ctime_ns, found.st_mtime_ns))


class RunFiles:
    """Guards a run against files that earlier runs wrote, and makes the run's own folders. Used as a context.

    `out` is the run's output folder, which is empty at first.
    """

    def __init__(self, script: str, case: str, work: Path, folders: Sequence[Path], ours: Sequence[Path] = ()) -> None:
        """Watch the files in `folders`, except those in bitproof's own folders `ours`.

        `work` is this run's own folder, inside a temporary folder that all runs of the command share.
        """
        self._script = script
        # The contents of files at the start of this run, by path; None from then on.
        self._at_start: dict[str, str] | None = None
        self._began = _Began(_stamp(work.parent / f"{case}.first-run"), _stamp(work / "script-run"))
        self._notes = work.parent / f"{case}.written"
        self.out = self._own_folder(work)
        checkouts, caches = work.parent / "revisions", [os.environ[name] for name in _CACHES if name in os.environ]
        # With a separator at the end, as the name of one folder may begin another's.
        self._checkouts = f"{os.path.realpath(checkouts)}{os.sep}"
        self._ours = tuple(f"{os.path.realpath(each)}{os.sep}" for each in map(str, (work.parent, *ours, *caches)))
        self._noted = set(self._notes.read_text().splitlines()) if self._notes.exists() else set()
        self._contents = work.parent / f"{case}.contents"
        self._before = _read_contents(self._contents)
        # `_asked`: paths of earlier runs' files that the script asked about, in order. By device and inode,
        # `_appended`: files that this run writes without removing what they had; `_earlier`: the files of earlier runs,
        # found below.
        self._asked: dict[str, None] = {}
        self._appended: set[_Identity] = set()
        self._earlier: set[_Identity] = set()
        tops = dict.fromkeys(os.path.realpath(each) for each in (*map(str, folders), *self._noted))
        found = ((path, _stat(path)) for path in _files_below(list(tops)))
        # A rank that reads a file which another rank watches already would be taken for a program of the script. So the
        # first rank of this machine reads them all, and the others take its results.
        with open(work / "at-start", "a+", encoding="utf-8", errors="surrogateescape") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._at_start = at_start = _read_contents(work / "at-start")
            earlier = {path: facts for path, facts in found if facts is not None and self._is_earlier(path, facts)}
            file.writelines(f"{content} {path}\n" for path, content in at_start.items())
        self._at_start = None
        self._earlier = {(facts.st_dev, facts.st_ino) for facts in earlier.values()}
        # Watched only from now on, since `_is_earlier` has just read some of these files.
        self._reads = _Reads([*earlier])
        self._asking = [mock.patch.object(os, name, self._noticing(getattr(os, name))) for name in _ASKS]
        self._within = threading.local()
        _listen()

    def _own_folder(self, work: Path) -> Path:
        # Both paths go through a short link, because the path of a socket in them may have only about 100 characters.
        short = work.parent / f"{self._began.this:x}"
        for name in ("tmp", "out"):
            (work / "own" / name).mkdir(parents=True, exist_ok=True)
        # Another rank of this run may have made the link.
        with contextlib.suppress(FileExistsError):
            short.symlink_to(work / "own")
        os.environ["TMPDIR"] = tempfile.tempdir = str(short / "tmp")
        return short / "out"

    def __enter__(self) -> RunFiles:
        _RUNNING.append(self)
        for each in self._asking:
            each.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # First, so that the files that the check below opens do not count as the script's.
        _RUNNING.remove(self)
        for each in self._asking:
            each.stop()
        # bitproof's own error names its cause. The script's may be due to an earlier run's file.
        if not isinstance(error, BitproofError):
            with refusing():
                self._check(error)

    def _check(self, error: BaseException | None) -> None:
        for path in self._reads.found():
            raise _refusal(
                f"{self._script}, or a program that it ran, reads {path}, which an earlier run of this comparison wrote"
            ) from error
        for path in self._asked:
            if (found := _stat(path)) is not None and self._is_earlier(path, found):
                raise _refusal(
                    f"the script {self._script} looks at {path}, which an earlier run of this comparison wrote"
                ) from error

    def _is_earlier(self, path: str, found: os.stat_result) -> bool:
        """Return whether an earlier run wrote this file, and this run has not overwritten it.

        False if the file has the same content as before the first run.
        """
        # Python itself writes and reads .pyc files, for each import.
        if not stat.S_ISREG(found.st_mode) or path.endswith(".pyc"):
            return False
        identity, is_overwritten = (found.st_dev, found.st_ino), found.st_mtime_ns >= self._began.this
        # A change of mode or name in this run hides the times of an earlier run, so files found at the start count,
        # too.
        is_others = self._began.is_between(found) or (identity in self._earlier and not is_overwritten)
        if not (is_others or identity in self._appended) or self._is_ours(path := os.path.realpath(path)):
            return False
        # At the start this file had another content than before the first run. It is watched since then: bitproof's own
        # reading would count as the script's.
        if identity in self._earlier and not is_overwritten:
            return True
        # Without a known earlier content, nothing shows that the file is unchanged.
        if path not in self._before:
            return True
        if self._at_start is None:
            return _content(path, found) != self._before[path]
        if path not in self._at_start:
            self._at_start[path] = str(_content(path, found))
        return self._at_start[path] != self._before[path]

    def _is_ours(self, path: str) -> bool:
        # The checkout of a script's revision is below a folder of bitproof's, but it is user code.
        return path.startswith(self._ours) and not path.startswith(self._checkouts)

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        with self._own_work() as is_theirs:
            if not is_theirs:
                return
            if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
                self._note_opened(os.fsdecode(args[0]), *args[1:3])
            elif event == "sqlite3.connect" and isinstance(args[0], str | bytes | os.PathLike):
                # SQLite opens the file itself, to read and to write.
                self._note_opened(os.fsdecode(args[0]), "r+", 0)
            elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
                # Only a rename replaces a file at the target; the other three fail if there is one.
                if event == "os.rename":
                    self._keep_content(os.fsdecode(args[1]))
                self._note_written(os.fsdecode(args[0 if event == "os.mkdir" else 1]))
            elif event in _CHANGES and isinstance(args[0], str | bytes | os.PathLike):
                self._keep_content(os.fsdecode(args[0]))
            elif event in _STARTS:
                # Any word of the command line may be a path.
                for word in _words(args[_STARTS[event]]):
                    self._note_question(word)

    def _note_opened(self, path: str, mode: str | None, flags: int) -> None:
        # `open` has a mode; `os.open` has None in its place, and flags.
        is_read = "r" in mode or "+" in mode if mode else flags & os.O_ACCMODE != os.O_WRONLY
        is_written = any(c in mode for c in "wax+") if mode else flags & os.O_ACCMODE != os.O_RDONLY
        # The audit event precedes the opening, so the file still has its old content.
        if is_written:
            self._keep_content(path)
            self._note_written(path)
        found = _stat(path)
        if found is None or not self._is_earlier(path, found):
            return
        is_lock = is_written and not found.st_size  # an empty file to write, such as a lock: there is nothing to read
        is_emptied = is_lock or ("w" in mode if mode else flags & os.O_TRUNC)
        if is_read and not is_emptied:
            raise refused(
                _refusal(f"the script {self._script} reads {path}, which an earlier run of this comparison wrote")
            )
        if is_emptied:
            self._appended.discard((found.st_dev, found.st_ino))
        else:  # the earlier content stays, so the file is still an earlier run's although this run writes it
            self._appended.add((found.st_dev, found.st_ino))

    def _note_written(self, path: str) -> None:
        path = os.path.realpath(path)
        # A line of the file is a path, so a path with a line break cannot be noted.
        if path not in self._noted and not self._is_ours(path) and "\n" not in path:
            self._noted.add(path)
            _append(self._notes, f"{path}\n")

    def _keep_content(self, path: str) -> None:
        path = os.path.realpath(path)
        if path in self._before or "\n" in path or (found := _stat(path)) is None or not stat.S_ISREG(found.st_mode):
            return
        content = _content(path, found) if found.st_ctime_ns < self._began.first else None
        # Another rank may have changed the file while it was read; then the content is not known.
        if content is not None and (now := _stat(path)) is not None and now.st_ctime_ns == found.st_ctime_ns:
            self._before[path] = content
            _append(self._contents, f"{content} {path}\n")

    @contextlib.contextmanager
    def _own_work(self) -> Iterator[bool]:
        """Context for bitproof's own work: files opened in it do not count as the script's.

        Yields True if the script's own code was running. Yields False inside another such context, or if the run is not
        watched.
        """
        is_theirs = self in _RUNNING and not getattr(self._within, "us", False)
        if is_theirs:
            self._within.us = True
        try:
            yield is_theirs
        finally:
            if is_theirs:
                self._within.us = False

    def _note_question(self, path: str, found: os.stat_result | None = None) -> None:
        if (found := found or _stat(path)) is not None and self._is_earlier(path, found):
            self._asked[os.path.abspath(path)] = None

    def _noticing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def ask(path: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(path, *args, **kwargs)
            with self._own_work() as is_theirs:
                if is_theirs and isinstance(path, str | bytes | os.PathLike) and kwargs.get("dir_fd") is None:
                    self._note_question(os.fsdecode(path), result if isinstance(result, os.stat_result) else None)
            return result

        for can in (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks):
            if own in can:  # shutil looks in these sets for what a function supports
                can.add(ask)
        return ask


# Bound before a run replaces `os.stat`.
_own_stat = os.stat
_ASKS = ("stat", "lstat", "access")


class _Reads:
    """Finds out which of certain files any process reads, with inotify. Without inotify, it finds no reads."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths: dict[int, str] = {}
        self._seen: dict[int, list[int]] = {}
        self._descriptor = -1
        library = ctypes.CDLL(None, use_errno=True)
        if not paths or not hasattr(library, "inotify_init1"):  # no Linux
            return
        self._descriptor = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _READ | _MODIFIED | _WRITTEN | _LOOKED | _OPENED
        for path in paths:
            watch = library.inotify_add_watch(self._descriptor, os.fsencode(path), mask)
            if watch >= 0:
                self._paths[watch] = path
            # A file that has been removed meanwhile needs no watch.
            elif os.path.lexists(path):
                raise UsageError(
                    f"the {len(paths)} files that earlier runs of this comparison wrote cannot be watched",
                    expected="room for them: another program that reads one would make runs begin differently",
                    found=f"{path}: {os.strerror(ctypes.get_errno())}",
                    fix="raise fs.inotify.max_user_watches or max_user_instances with sysctl, or have runs write less",
                )

    def found(self) -> Iterator[str]:
        """Stop watching, and yield each file that was read before its content changed."""
        if self._descriptor < 0:
            return
        seen: dict[int, int] = {}
        try:
            while events := os.read(self._descriptor, 1 << 20):
                for watch, event in _events(events):
                    # A file that was modified first is this run's: what is read afterwards does not count.
                    if not seen.get(watch, 0) & _MODIFIED or event & _MODIFIED:
                        seen[watch] = seen.get(watch, 0) | event
        except BlockingIOError:
            pass
        os.close(self._descriptor)
        self._descriptor = -1
        for watch, event in seen.items():
            # Reads of mapped memory are not reported, so a file that was opened and not written counts as read.
            if event & (_READ | _LOOKED) or event & (_OPENED | _MODIFIED | _WRITTEN) == _OPENED:
                yield self._paths.get(watch, "a file")


def _events(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(data):
        # struct inotify_event: watch, mask, cookie, length of the name that follows.
        watch, mask, _, length = struct.unpack_from("iIII", data, at)
        at += 16 + length
        yield watch, mask


def _files_below(tops: Sequence[str]) -> Iterator[str]:
    yield from (each for each in tops if os.path.isfile(each))
    # Level by level, so that a deep folder cannot use up the limit before shallow files are seen.
    left, seen, num = [each for each in tops if os.path.isdir(each)], set(tops), 0
    while left and num < _MOST_FILES:
        inner: list[str] = []
        for folder in left:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for each in entries:
                    num += 1
                    if each.is_file(follow_symlinks=False):
                        yield each.path
                    elif each.is_dir(follow_symlinks=False) and each.name not in _NOT_WATCHED and each.path not in seen:
                        seen.add(each.path)
                        inner.append(each.path)
        left = inner


def _stat(path: str) -> os.stat_result | None:
    try:
        return _own_stat(path)
    except (OSError, ValueError):
        return None


def _append(file: Path, line: str) -> None:
    # A single write in append mode: lines of several ranks never mix.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, line.encode(errors="surrogateescape"))
    os.close(descriptor)


def _content(path: str, found: os.stat_result) -> str | None:
    with contextlib.suppress(OSError):
        if found.st_size <= _MOST_BYTES:
            # With the mode, as a script behaves differently if an earlier run has made its input unreadable.
            facts = f"{found.st_mode} {found.st_uid} {found.st_gid} ".encode()
            return hashlib.sha256(facts + Path(path).read_bytes()).hexdigest()
    return None


def _read_contents(file: Path) -> dict[str, str]:
    lines = file.read_text(errors="surrogateescape").splitlines() if file.exists() else []
    return {path: content for content, _, path in (line.partition(" ") for line in lines)}


def _words(given: Any) -> Iterator[str]:
    """Yield the words of a command line and their parts: `--out=a.txt` also yields `a.txt`."""
    for each in [given] if isinstance(given, str | bytes | os.PathLike) else given or ():
        if isinstance(each, str | bytes | os.PathLike):
            yield from {os.fsdecode(each), *_BREAKS.split(os.fsdecode(each))} - {""}


def _stamp(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `time.time_ns`: the stamp is compared with other files' times, so it needs the file system's clock.
    path.open("ab").close()
    return path.stat().st_mtime_ns


def _refusal(what: str) -> UsageError:
    return UsageError(
        what,
        expected="runs that begin with the same files: each side runs twice, in one working directory",
        fix="run the command again if the file is input, such as a download; else let the script write to the folder "
        "{out}, as in `-- --out-dir {out}`: it is new and empty in each run",
    )
