"""The host process as seen by the command: starts early, gets requests as lines of JSON, is killed with its
descendants.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from bitproof.harness.errors import RankError
from bitproof.harness.execute.failures import Problem, signal_name, tail
from bitproof.harness.execute.requests import Request
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.options import OnEvent
from bitproof.harness.processes import framing
from bitproof.harness.processes.forked import ask_for_stacks
from bitproof.harness.processes.started import Started
from bitproof.harness.records import Event

A = TypeVar("A")

_LOOK_SECONDS = 0.5  # between two looks at whether any caller still waits
_END_SECONDS = 1.0  # for a host to end its descendants by itself


class HostLost(Exception):  # noqa: N818 (a message between modules; users see its `error`)
    """The host process ended, or was killed because it did not respond (`silent` is True). `error` describes this to
    the user.
    """

    def __init__(self, error: RankError, *, silent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.silent = silent


class Abandoned(Exception):  # noqa: N818 (a message between modules, as above)
    """The host process was killed together with its ranks, because the answer to a request is no longer needed."""


class HostProcess:
    """A host process. Every rank is in the process group of the host, so that a single signal ends all of them.

    The process starts when this object is made, and imports torch while the caller continues.

    - `temporary`: the folder for temporary files of the host and of its descendants, such as compilers.
    - `starts`: names the ranks that this host starts, in errors, such as "rank 3 on node7"; None if it starts all
      ranks.
    """

    def __init__(
        self, log: Path, *, temporary: Path | None = None, verbose: bool = False, starts: str | None = None
    ) -> None:
        self.log = log
        self._starts = starts or "the ranks"
        arguments = ["--verbose"] if verbose else []
        arguments += ["--temporary", str(temporary)] if temporary else []
        arguments += ["--parent", str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # the kernel watches the thread that forks
            arguments += ["--signalled"]
        environment = _host_environment(is_alone=starts is None) | ({"TMPDIR": str(temporary)} if temporary else {})
        self._process = Started("bitproof.harness.execute.host.main", arguments, log=log, environment=environment)
        self._is_busy = False

    def ask(
        self,
        request: Request[A],
        timeout: float,
        on_event: OnEvent,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> A:
        """Send a request and return its answer. Events before the answer go to `on_event`.

        Raises the BitproofError that is the answer, HostLost if the host process dies or `timeout` seconds have passed,
        and Abandoned once `is_abandoned` returns True.
        """
        deadline = time.monotonic() + timeout
        if is_abandoned():
            self.kill()
            raise Abandoned
        self._is_busy = True
        try:
            self._process.send(request)
        except OSError as error:
            # The pipe is closed: the host has died since the last request.
            raise self._crash_error() from error
        while True:
            match framing.read(self._next_line(deadline, timeout, is_abandoned), Event, Problem, request.answer):
                case Event() as event:
                    on_event(event)
                    if is_abandoned():  # a talkative host would never be checked without this
                        self.kill()
                        raise Abandoned
                case Problem() as problem:
                    self._is_busy = False
                    raise problem.error()
                case answer:
                    self._is_busy = False
                    return cast(A, answer)

    def end_if_idle(self) -> None:
        """Ask the host process to end if it is idle, without waiting. Call it early: freeing torch's memory takes a
        while."""
        if not self._is_busy:
            self._process.kill_without_waiting()

    def kill(self) -> None:
        """End the host process and all its descendants now. Does nothing if it has ended."""
        if self._is_busy and self._process.status is None:  # the host can find processes that left its group
            self._process.close_requests()
            self._process.wait(_END_SECONDS)
        self._process.kill()

    def _next_line(self, deadline: float, timeout: float, is_abandoned: Callable[[], bool]) -> bytes:
        inlet = self._process.inlet
        # Short waits, so that an abandoned request is noticed soon.
        while (line := inlet.wait(max(0.0, min(deadline - time.monotonic(), _LOOK_SECONDS)))) is None:
            if inlet.is_over:
                raise self._crash_error()
            if is_abandoned():
                self.kill()
                raise Abandoned
            if time.monotonic() >= deadline:
                raise self._timeout_error(timeout)
        return line

    def _crash_error(self) -> HostLost:
        # The answers end a moment before the kernel reports the exit, and only a reaped process has a status.
        self._process.wait(1.0)
        self.kill()
        code = self._process.status
        assert code is not None, "it was reaped"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
        error = RankError(
            f"the process that starts {self._starts} {how}",
            where=_log_name(self.log),
            fix="see its last output below",
            traceback=tail(self.log) or None,
        )
        return HostLost(error, silent=False)

    def _timeout_error(self, timeout: float) -> HostLost:
        # First, since the stacks go into the log, whose end becomes a part of the error.
        ask_for_stacks([self._process.pid])
        self.kill()
        error = RankError(
            f"the case ran longer than {timeout:g} s, and its ranks had not started",
            where=_log_name(self.log),
            fix="see below where it was; if it was only slow, give a longer --timeout",
            traceback=tail(self.log) or None,
        )
        return HostLost(error, silent=True)


def _host_environment(is_alone: bool) -> dict[str, str]:
    environment = dict(ENVIRONMENT)
    if is_alone and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that resolves nowhere must not matter
    return environment


def _log_name(log: Path) -> str:
    return str(Path(*log.parts[-2:]))
