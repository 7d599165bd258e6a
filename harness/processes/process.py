"""Helpers for processes: ending with their parent, descriptors that children must not have, logs, cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

MAX_LOG_BYTES = 64 << 20
"""The longest log. A longer log keeps only its first and last KEPT_LOG_BYTES."""
KEPT_LOG_BYTES = 1 << 20

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_private: set[int] = set()


def keep_private(fd: int) -> None:
    """Mark a descriptor as private to this process: processes that it forks close the descriptor first.

    `close_kept` closes it in this process.
    """
    _private.add(fd)


def close_kept(fd: int) -> None:
    """Close a descriptor that `keep_private` marked. A second call does nothing: the number may belong to another
    file."""
    if fd in _private:
        _private.discard(fd)
        os.close(fd)


def close_private() -> None:
    """Close, in a newly forked process, the private descriptors of its parent, so that it cannot write into them."""
    for fd in list(_private):
        close_kept(fd)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process the signal `number` when the thread that started it ends. Other systems do
    nothing.

    `parent` is the id of the parent process. If it has ended already, the signal is sent at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent ended before the request above, so its signal never arrives.
    if os.getppid() != parent:
        signal.raise_signal(number)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of all descendants whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Return the process ids of this process's children; empty if the system does not list them."""
    try:
        return {
            int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        }
    except OSError:
        return set()


def cpu_of_descendants() -> float:
    """Return the CPU seconds that all descendants have used, including ended children of theirs; 0 if unknown.

    The time of a child is lost if its parent is killed before it has waited for the child. So measure before processes
    end.
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
    """Kill all children of this process except `but`, and the orphans that then become its children."""
    # Children of a killed child become this process's own, so look again until none is left.
    while found := children() - but:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def keep_to_one_core(rank: int, num_ranks: int) -> None:
    # Ranks wait for each other hundreds of times in a step, and would move to another core at every wait. Pinned, eight
    # ranks on two cores need a sixth less time for a step.
    if sys.platform != "linux":
        return
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def redirect_output(log: Path, *, adds: bool = False) -> None:
    """Redirect standard output and error of this process, also those of C libraries, to a log. Standard input becomes
    empty.

    With `adds` the content of the log stays, and several processes may append to it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    _point(1, log, adds)
    # A single open file for both streams keeps the order of their lines.
    os.dup2(1, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def keep_short(log: Path) -> None:
    """Remove the middle of a log that is larger than MAX_LOG_BYTES, while processes may be writing to it."""
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
