"""Refuses effects of a program outside of its own objects: on files, processes or the environment.

A program runs on copies of its objects, but files and other processes have no copy. Python announces effects on them to
audit hooks before they happen (PEP 578). Such an event raises RefusedError: a step that counts its calls in a file is
refused at `open(path, "w")`.

Effects without an event are found by comparing the state of the process, such as sizes of open files, or by patching
functions. A file that another library, such as Arrow, opens outside of Python is not noticed.
"""

from __future__ import annotations

import atexit
import contextvars
import decimal
import fcntl
import functools
import gc
import inspect
import mmap
import os
import random
import signal
import stat
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy
import torch

from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.torch_compat import before_saving
from bitproof.harness.within_user_code import refusals_raised, refused

_OUTWARD = (
    *("os", "subprocess", "socket", "shutil", "sqlite3", "mmap", "pty", "fcntl", "resource", "syslog", "signal"),
    *("atexit", "random"),
)
"""Families of audit events with effects outside of the program's objects. The events in _READING only read."""

_READING = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr", "socket.gethostname"}

_REFLECTIVE = {
    *("sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile"),
    *("sys.addaudithook", "gc.get_objects", "gc.get_referrers", "gc.get_referents", "exec", "compile"),
    *("object.__setattr__", "object.__delattr__", "code.__new__"),
}
"""Events through which code may read or change state that is not compared. They are refused in a user's code only."""

_LOOKING = (inspect.__file__, traceback.__file__)
"""Files of library functions that read the stack for their caller."""

_NOT_THE_PROGRAMS = (
    "<frozen importlib",
    *(os.path.join(os.path.dirname(torch.__file__), name) for name in ("_inductor", "_dynamo", "_logging")),
)
"""Prefixes of the files of code that writes files by itself: bytecode, compiled code, logs."""

_hearing: set[int] = set()
"""The identifiers of threads that are in `_heard` now."""

_watches: list[tuple[set[int], Callable[[str], bool]]] = []
"""For each program that runs: (threads that existed before it, `is_users_file` of `refusing_side_effects`)."""


@contextmanager
def refusing_side_effects(is_users_file: Callable[[str], bool]) -> Iterator[None]:
    """Raise RefusedError if a program, within a `with` block, changes anything but objects that it can reach.

    If the program catches the error, it is raised again at the end. `is_users_file` returns whether a file is a user's
    code.
    """
    _hook()
    # Threads that the program starts later are its own, and are watched.
    others = {x.ident for x in threading.enumerate() if x.ident is not None} - {threading.get_ident()}
    watch = (others, is_users_file)
    _watches.append(watch)
    try:
        # torch.save and safetensors write files without an event, so their writers are patched.
        with refusals_raised(), before_saving(_refuse_file), _safetensors_checked(), _silent_announced():
            yield
    finally:
        _watches.remove(watch)


def _refuse_file(file: object) -> None:
    # Only a path is refused. Writes to an open file object are noticed afterwards, by its size and position.
    if isinstance(file, str | os.PathLike):
        raise refused(RefusedError(f"it opens {str(file)!r} to write, which nothing compares", where="the program"))


@contextmanager
def _safetensors_checked() -> Iterator[None]:
    with ExitStack() as stack:
        for module in filter(None, map(sys.modules.get, ("safetensors.torch", "safetensors.numpy"))):
            own = vars(module)["serialize_file"]

            # `own` is a default value, since the loop binds the name again.
            def checked(tensors: Any, file: object, *args: Any, own: Any = own, **kwargs: Any) -> Any:
                _refuse_file(file)
                return own(tensors, file, *args, **kwargs)

            stack.enter_context(mock.patch.object(module, "serialize_file", checked))
        yield


_SILENT = ((os, "urandom"), (random, "_urandom"), (atexit, "register"), (atexit, "unregister"))
"""Functions that cause no audit event.

They read random numbers from the system, or register a function in the process.
"""


@contextmanager
def _silent_announced() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in _SILENT:
            own, event = getattr(module, name), f"{module.__name__}.{name.lstrip('_')}"

            def announced(*args: Any, own: Any = own, event: str = event, **kwargs: Any) -> Any:
                sys.audit(event)
                return own(*args, **kwargs)

            stack.enter_context(mock.patch.object(module, name, announced))
        yield


@functools.cache
def _hook() -> None:
    # Python cannot remove an audit hook, so it is added once and does nothing while no program runs.
    sys.addaudithook(_heard)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _watches or not _concerns(event):
        return
    (others, is_users_file), thread = _watches[-1], threading.get_ident()
    # Threads that existed before the program are not its own. `_effect_of` below causes events itself, such as
    # `sys._getframe`.
    if thread in others or thread in _hearing:
        return
    _hearing.add(thread)
    try:
        what = _effect_of(event, args, sys._getframe(1), is_users_file)
    finally:
        _hearing.discard(thread)
    if what:
        raise refused(RefusedError(f"it {what}, which nothing compares", where="the program"))


@functools.cache
def _concerns(event: str) -> bool:
    family = event.partition(".")[0]
    return event == "open" or event in _REFLECTIVE or (family in (*_OUTWARD, "ctypes") and event not in _READING)


def _effect_of(event: str, args: tuple[Any, ...], frame: FrameType, is_users_file: Callable[[str], bool]) -> str | None:
    """Return the effect of an audit event in words. None if it only reads, or if an import or a compiler causes it.

    `frame` caused the event. Inspecting the stack only counts if a user's code does it.
    """
    if event in _REFLECTIVE or event.startswith("ctypes."):
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename in _LOOKING:
            caller = caller.f_back
        # Libraries such as torch inspect the stack for their own purposes.
        is_own = caller is not None and is_users_file(caller.f_code.co_filename)
        return f"calls {event}" if is_own else None
    if event == "open" and not _opens_to_write(*args[:3]):
        return None
    # No write to such a mapping reaches the file.
    if event == "mmap.__new__" and len(args) > 2 and args[2] in (mmap.ACCESS_READ, mmap.ACCESS_COPY):
        return None
    # Search outwards for the user's line behind the event. An import or a compiler on the way is what writes.
    inner: FrameType | None = frame
    while inner is not None and not is_users_file(name := inner.f_code.co_filename):
        if name.startswith(_NOT_THE_PROGRAMS):
            return None
        inner = inner.f_back
    return f"opens {args[0]!r} to write" if event == "open" else f"calls {event}"


def _opens_to_write(path: Any, mode: str | None, flags: int | None) -> bool:
    # The content of this file is always empty, whatever is written.
    if path == os.devnull:
        return False
    # `os.open` has flags instead of a mode.
    if mode is not None:
        return any(x in mode for x in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))


def process_state() -> Mapping[str, Any]:
    """Return those parts of the process's state that a call may change without an audit event.

    The keys describe the state, such as "the environment variables". Equal values mean unchanged state.
    """
    # A program may keep a count in an attribute of a thread.
    threads = [(x.ident, x.name, len(vars(x))) for x in threading.enumerate()]
    own = vars(threading.current_thread()).items()
    plain = {key: value for key, value in own if isinstance(value, int | float | str)}
    einsum = torch.backends.opt_einsum
    found: dict[str, Any] = {
        "the environment variables": dict(os.environ),
        "the limit of recursion": sys.getrecursionlimit(),
        "the threads' switch interval": sys.getswitchinterval(),
        "the thresholds of the garbage collector": gc.get_threshold(),
        "the threads": [threads, plain],
        "the decimal context": repr(decimal.getcontext()),
        "NumPy's treatment of errors": numpy.geterr(),
        "NumPy's print options": {key: repr(value) for key, value in numpy.get_printoptions().items()},
        "einsum's order of products": (einsum.enabled, einsum.strategy),
        "the detection of anomalies": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "whether warnings are repeated": torch.is_warn_always_enabled(),
        "the handlers of signals": {str(x): repr(signal.getsignal(x)) for x in signal.valid_signals()},
        # Only whether it runs, since the remaining time always changes.
        "the timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "the open files": _open_files(),
        "the mask of new files": _mask_of_new_files(),
    }
    # By identity, as the value of a context variable may be any object.
    return found | {f"the context variable {x.name}": id(y) for x, y in contextvars.copy_context().items()}


def _open_files() -> dict[int, Any]:
    """Return the state of each open file by its descriptor; {} if the system is not Linux.

    - For a regular file: its device, inode, size and offset.
    - For a pipe with both ends in this process: its device, inode and number of unread bytes.

    Standard streams are left out, and so are files that an ancestor of this process has open.
    """
    found: dict[int, Any] = {}
    pipes: dict[int, tuple[int, int]] = {}
    try:
        numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    except (OSError, ValueError):
        return {}  # not on Linux
    for number in numbers:
        with suppress(OSError):  # the descriptor that listed the others is closed by now
            facts = os.fstat(number)
            if stat.S_ISREG(facts.st_mode):
                found[number] = facts.st_dev, facts.st_ino, facts.st_size, os.lseek(number, 0, os.SEEK_CUR)
            # A program may keep bytes in its own pipe, and read them in the next call.
            elif stat.S_ISFIFO(facts.st_mode):
                pipes[number] = facts.st_dev, facts.st_ino
    others = {found[x][:2] for x in (0, 1, 2) if x in found} | _files_of_ancestors()
    found = {number: facts for number, facts in found.items() if facts[:2] not in others}
    # Both ends of a pipe have the same inode.
    own = [number for number, facts in pipes.items() if [*pipes.values()].count(facts) > 1]
    return found | {number: (*pipes[number], fcntl.ioctl(number, termios.FIONREAD, bytes(4))) for number in own}


def _files_of_ancestors() -> set[tuple[int, int]]:
    # An ancestor, such as a shell that writes a log, may write to its open files at any time.
    found: set[tuple[int, int]] = set()
    process = os.getppid()
    while process > 0:
        with suppress(OSError):  # a process of another user
            for number in os.listdir(folder := f"/proc/{process}/fd"):
                with suppress(OSError):
                    facts = os.stat(f"{folder}/{number}")
                    found.add((facts.st_dev, facts.st_ino))
        try:
            # The process's name, in parentheses, may contain spaces. Its state and its parent's id follow.
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def _mask_of_new_files() -> str | None:
    with suppress(OSError):
        # On other systems than Linux, reading the umask means setting it.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((line for line in lines if line.startswith("Umask")), None)
    return None


def of_file(address: int) -> tuple[object, int]:
    """Return an identity for the byte at a memory address. Two addresses of the same byte have equal identities.

    For a byte of a mapped file, it is (file, position in the file), otherwise ("memory", address).
    """
    found = next((x for x in _shared_mappings() if x.start <= address < x.end), None)
    return (found.file, found.offset + address - found.start) if found else ("memory", address)


@dataclass(frozen=True)
class _Mapping:
    """A shared mapping of a file: the addresses from `start` up to `end` are the file's bytes from `offset` on.

    `file` is (device, inode).
    """

    start: int
    end: int
    offset: int
    file: tuple[str, int]


def _shared_mappings() -> list[_Mapping]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        # For example `7f00-7f10 rw-s 00000000 08:01 1234 /tmp/x`, where s stands for shared.
        addresses, access, offset, device, inode, *_ = line.split(maxsplit=5)
        if access.endswith("s"):
            start, end = (int(x, 16) for x in addresses.split("-"))
            found.append(_Mapping(start, end, int(offset, 16), (device, int(inode))))
    return found
