"""Fork a process of bitproof: what it does first and last, and how its parent controls it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bitproof.harness.printable import printable
from bitproof.harness.processes.channel import Inlet, send
from bitproof.harness.processes.process import close_kept, close_private, die_with_parent, keep_private, redirect_output

Send = Callable[[Any], None]
Body = Callable[[Send], int | None]
"""What a forked process runs. It gets a function that sends messages to the parent, and returns the exit status, None
for 0."""

_STACK_SECONDS = 0.5


class Child:
    """A forked process, as seen by its parent. `status` is its exit status; None until the parent knows that it has
    ended."""

    def __init__(self, pid: int, inlet: Inlet, log: Path | None, requests: int | None) -> None:
        self.pid = pid
        self.inlet = inlet
        self.log = log
        self.status: int | None = None
        self._requests = requests

    def send(self, request: Any) -> None:
        """Send a request to the child, without waiting for an answer. Does nothing if the child has ended."""
        assert self._requests is not None, "it is asked"
        with contextlib.suppress(BrokenPipeError):
            send(self._requests, request)

    def close_requests(self) -> None:
        """Close the pipe for requests. The child ends after the last request."""
        if self._requests is not None:
            close_kept(self._requests)

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < limit:
            time.sleep(0.005)

    def kill_without_waiting(self) -> None:
        """Kill the child without waiting for its end."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the child, wait for its end, and close the pipes to it. A second call does nothing."""
        if not self.has_ended():
            self.kill_without_waiting()
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.close_requests()
        close_kept(self.inlet.fd)
        self.inlet.fd, self.inlet.is_over = -1, True


def fork(body: Body, *, log: Path | None = None) -> Child:
    """Fork a process that runs `body` and then ends. Its output, and its stack on request, go to the file `log`.

    The file is emptied first.
    """
    return _fork(body, log, adds=False, is_asked=False)


def fork_asked(body: Callable[[Send, int], int | None], *, log: Path | None = None, adds: bool = False) -> Child:
    """Fork a process that receives requests: `body` gets a function that sends messages, and a descriptor to read
    requests from.

    Its output goes to the file `log`. Unless `adds` is set, the file is emptied first.
    """
    return _fork(body, log, adds, is_asked=True)


def ask_for_stacks(processes: list[int]) -> None:
    """Make processes of bitproof write their stacks into their logs, and wait for half a second."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACK_SECONDS)


def _fork(body: Callable[..., int | None], log: Path | None, adds: bool, is_asked: bool) -> Child:
    reader, writer = os.pipe()
    requests, requests_writer = os.pipe() if is_asked else (None, None)
    # The child would write buffered output a second time.
    sys.stdout.flush()
    sys.stderr.flush()
    # The id is read before the fork: the child compares it with its parent's id.
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(reader)
        if requests_writer is not None:
            os.close(requests_writer)
        _run_child(body, parent, writer, requests, log, adds)
    os.close(writer)
    keep_private(reader)
    if requests is not None and requests_writer is not None:
        os.close(requests)
        keep_private(requests_writer)
    return Child(pid, Inlet(reader), log, requests_writer)


def _run_child(
    body: Callable[..., int | None], parent: int, writer: int, requests: int | None, log: Path | None, adds: bool
) -> NoReturn:
    status = 1
    try:
        # The parent's handler is for the command, not for its children.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        close_private()
        for fd in (writer, requests):
            if fd is not None:
                keep_private(fd)
        if log is not None:
            redirect_output(log, adds=adds)
        # Descriptor 2, not `sys.stderr`: user code may replace that.
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
        to_parent = functools.partial(send, writer)
        status = (body(to_parent) if requests is None else body(to_parent, requests)) or 0
    except BaseException:
        os.write(2, printable(traceback.format_exc()).encode(errors="replace"))
    finally:
        with contextlib.suppress(BaseException):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: the child must not run its parent's `finally` blocks and exit handlers.
        os._exit(status)
