"""The host as the command line sees it: started early, asked by JSON lines, killed with all that it started."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from bitproof.harness.errors import RankError
from bitproof.harness.execute import wire
from bitproof.harness.execute.failures import Problem, signal_name, tail
from bitproof.harness.execute.requests import Request
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.options import OnEvent
from bitproof.harness.records import Event

A = TypeVar("A")

_LOOK_SECONDS = 0.5  # between two looks at whether anybody still waits
_END_SECONDS = 1.0  # for a host to end by itself what it has started

_START = str(Path(__file__).parents[1] / "program" / "start.py")


class HostLost(Exception):  # noqa: N818 (a message between modules; users see its `error`)
    """The host ended by itself, or fell silent and was killed. `error` tells the user."""

    def __init__(self, error: RankError, *, silent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.silent = silent


class Abandoned(Exception):  # noqa: N818 (a message between modules, as above)
    """The host was killed with its ranks, as nobody waits for its answer any more."""


class HostProcess:
    """One host. Its process group holds every rank, so that one signal ends them all.

    It starts at once and imports torch while the caller does something else. Its temporary files, and those
    of all that it starts, such as compilers, go into the folder `temporary`. `is_alone`: it has all ranks of a run.
    """

    def __init__(
        self, log: Path, *, temporary: Path | None = None, verbose: bool = False, is_alone: bool = True
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        command = [sys.executable, "-P", _START, "bitproof.harness.execute.host", "--answers", str(writer)]
        command += ["--verbose"] if verbose else []
        command += ["--temporary", str(temporary)] if temporary else []
        command += ["--parent", str(os.getpid())]
        if threading.current_thread() is threading.main_thread():  # the kernel watches the thread that forks
            command += ["--signalled"]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writer],
                    env=_host_environment(is_alone) | ({"TMPDIR": str(temporary)} if temporary else {}),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._reader = reader
        self._received = b""
        self._is_busy = False
        atexit.register(self.kill)

    def ask(
        self,
        request: Request[A],
        timeout: float,
        on_event: OnEvent,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> A:
        """Send one request and wait for its answer; events on the way go to `on_event`.

        Raises the BitproofError that the host answers, HostLost when it dies or has not answered after `timeout`
        seconds, and Abandoned once `is_abandoned`, which is asked now and then, says that nobody waits any more.
        """
        deadline = time.monotonic() + timeout
        if is_abandoned():
            self.kill()
            raise Abandoned
        self._is_busy = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(wire.write(request))
            self._process.stdin.flush()
        except OSError as error:
            raise self._crash() from error
        while True:
            match wire.read(self._next_line(deadline, timeout, is_abandoned), Event, Problem, request.answer):
                case Event() as event:
                    on_event(event)
                    if is_abandoned():  # one who tells much is never silent for long enough to be asked about
                        self.kill()
                        raise Abandoned
                case Problem() as problem:
                    self._is_busy = False
                    raise problem.error()
                case answer:
                    self._is_busy = False
                    return cast(A, answer)

    def end_if_idle(self) -> None:
        """Begin to end a host that is asked nothing: what a process of that size holds takes a while to give back."""
        if self._process.returncode is None and not self._is_busy:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the host and every process below it, now. Harmless when done before."""
        atexit.unregister(self.kill)
        if self._process.returncode is None:
            if self._is_busy and self._process.stdin is not None:  # what left the group, the host can find
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
                self._wait(_END_SECONDS)
            # Before the host is reaped its pid, which is its group's, cannot belong to anybody else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    def _has_ended(self) -> bool:
        """Whether the host has ended; it stays to be reaped."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _next_line(self, deadline: float, timeout: float, is_abandoned: Callable[[], bool]) -> bytes:
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._reader], [], [], max(0.0, min(left, _LOOK_SECONDS)))
            if not readable and is_abandoned():
                self.kill()
                raise Abandoned
            if not readable and left <= _LOOK_SECONDS:
                raise self._silence(timeout)
            if not readable:
                continue
            content = os.read(self._reader, 1 << 16)
            if not content:
                raise self._crash()
            self._received += content
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < limit:
            time.sleep(0.01)

    def _crash(self) -> HostLost:
        self._wait(1.0)
        self.kill()
        code = self._process.returncode
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
        error = RankError(
            f"the process that starts the ranks {how}",
            where=_log_name(self.log),
            fix="see its last output below",
            traceback=tail(self.log) or None,
        )
        return HostLost(error, silent=False)

    def _silence(self, timeout: float) -> HostLost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.kill()
        error = RankError(
            f"the case ran longer than {timeout:g} s, and its ranks had not started",
            where=_log_name(self.log),
            fix="see below where it was; if it was only slow, give a longer --timeout",
            traceback=tail(self.log) or None,
        )
        return HostLost(error, silent=True)


def _host_environment(is_alone: bool) -> dict[str, str]:
    environment = os.environ | ENVIRONMENT
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if sys.flags.safe_path:  # told by `-P`, perhaps, which only this process has seen
        environment["PYTHONSAFEPATH"] = "1"
    if is_alone and sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves nowhere must not matter
    return environment


def _log_name(log: Path) -> str:
    return str(Path(*log.parts[-2:]))
