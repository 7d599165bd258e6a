"""Helpers for processes: ending with their parent, private descriptors, logs, cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

MAX_LOG_BYTES = 64 << 20
"""The longest log; beyond it only KEPT_LOG_BYTES of its beginning and of its end are kept."""
KEPT_LOG_BYTES = 1 << 20

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_private: set[int] = set()


def keep_private(fd: int) -> None:
    """Let processes that are forked from now on close the descriptor `fd`, so that it stays private to this process.

    This holds until this process closes the descriptor with `close_kept`.
    """
    _private.add(fd)


def close_kept(fd: int) -> None:
    """Close a private descriptor. A second call does nothing: its number may belong to another file by then."""
    if fd in _private:
        _private.discard(fd)
        os.close(fd)


def close_private() -> None:
    """Close the parent's private descriptors in a newly forked process, so that nothing in it can write into them."""
    for fd in list(_private):
        close_kept(fd)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process the signal `number` when the thread that started it ends. Does nothing on other
    systems.

    `parent` is the parent's process id. If the parent has already ended, the signal is raised at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent ended before the request above, so its signal never arrives.
    if os.getppid() != parent:
        signal.raise_signal(number)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of its orphaned descendants, in any session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The process ids of this process's children; an empty set if the system does not show them."""
    try:
        return {
            int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        }
    except OSError:
        return set()


def cpu_of_descendants() -> float:
    """The CPU seconds that all descendants have used, including ended children of theirs; 0 if unknown.

    If a process is killed before it has waited for its children, their time is lost. So measure before processes end.
    """
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name is in parentheses and may contain any character. Fields 11 to 14 after it are CPU
            # times: its own, in user mode and in the kernel, and those of its children that it waited for.
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found, pending = 0.0, [os.getpid()]
    while pending:
        below = [pid for pid, parent in parents.items() if parent == pending[-1]]
        pending[-1:] = below
        found += sum(used[pid] for pid in below)
    return found


def end_children(*, but: set[int]) -> None:
    """End all children except `but`, and then their orphans, which become children of this process."""
    # Children of a killed child become this process's own, so look again until none is left.
    while found := children() - but:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def keep_to_one_core(rank: int, num_ranks: int) -> None:
    """Pin this rank to one core, if there are more ranks than cores."""
    # Ranks wait for each other hundreds of times in a step, and would move to another core at every wait. Pinned, eight
    # ranks on two cores need a sixth less time for a step.
    if sys.platform != "linux":
        return
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def redirect_output(log: Path, *, adds: bool = False) -> None:
    """Redirect this process's standard output and error, including C libraries, to a log. Standard input becomes empty.

    With `adds` the log's content stays: several processes may append to it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    _point(1, log, adds)
    # A single open file for both streams keeps the order of their lines.
    os.dup2(1, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def keep_short(log: Path) -> None:
    """Remove the middle of a log that is larger than MAX_LOG_BYTES. Processes may be writing to it."""
    # All writers append, so their next output follows the end that is kept.
    try:
        size = log.stat().st_size
    except OSError:  # missing: not created yet, or removed
        return
    if size <= MAX_LOG_BYTES:
        return
    with log.open("r+b") as file:
        file.seek(size - KEPT_LOG_BYTES)
        end = file.read(KEPT_LOG_BYTES)
        file.truncate(KEPT_LOG_BYTES)
        file.seek(KEPT_LOG_BYTES)
        file.write(b"\n... the middle of this log is left out: it had grown too long ...\n" + end)


def _point(fd: int, log: Path, adds: bool) -> None:
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if adds else os.O_TRUNC), 0o644)
    os.dup2(opened, fd)
    os.close(opened)
