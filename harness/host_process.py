"""The host as the command line sees it: started early, asked by JSON lines, killed with all that it started."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import errors
from harness.determinism import ENVIRONMENT
from harness.errors import BitproofError, RankError
from harness.failures import tail

OnEvent = Callable[[dict[str, Any]], None]


class HostLost(Exception):  # noqa: N818 (a message between modules; users see its `error`)
    """The host ended by itself, or fell silent and was killed. `error` tells the user."""

    def __init__(self, error: RankError, *, silent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.silent = silent


class HostProcess:
    """One host. Its process group holds every rank, so that one signal ends them all.

    It starts at once and imports torch while the caller does something else. Its temporary files, and those
    of all that it starts, such as compilers, go into the folder `temporary`.
    """

    def __init__(self, log: Path, *, temporary: Path | None = None, verbose: bool = False) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "harness.host", "--answers", str(writer)]
        command += ["--verbose"] if verbose else []
        if threading.current_thread() is threading.main_thread():  # the kernel watches the thread that forks
            command += ["--parent", str(os.getpid())]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writer],
                    env=_host_environment() | ({"TMPDIR": str(temporary)} if temporary else {}),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._reader = reader
        self._received = b""
        atexit.register(self.kill)

    def ask(self, request: dict[str, Any], timeout: float, on_event: OnEvent) -> dict[str, Any]:
        """Send one request and wait for its answer; events on the way go to `on_event`.

        Raises the BitproofError that the host answers, or HostLost when it dies or has
        not answered after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._crash() from error
        while True:
            message = self._next_message(deadline, timeout)
            if "answer" in message:
                answer: dict[str, Any] = message["answer"]
                return answer
            if "error" in message:
                raise _error(message["error"])
            on_event(message)

    def close(self) -> None:
        """Let the host end by itself for a moment, then kill what is left."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        limit = time.monotonic() + 2.0
        while not self._has_ended() and time.monotonic() < limit:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End the host and every process in its group, now. Harmless when done before."""
        atexit.unregister(self.kill)
        if self._process.returncode is None:
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

    def _next_message(self, deadline: float, timeout: float) -> dict[str, Any]:
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise self._silence(timeout)
            content = os.read(self._reader, 1 << 16)
            if not content:
                raise self._crash()
            self._received += content
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _crash(self) -> HostLost:
        limit = time.monotonic() + 1.0
        while not self._has_ended() and time.monotonic() < limit:
            time.sleep(0.01)
        self.kill()
        code = self._process.returncode
        killed = code < 0
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if killed else f"exited with status {code}"
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


def _host_environment() -> dict[str, str]:
    environment = os.environ | ENVIRONMENT
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves nowhere must not matter
    return environment


def _error(values: dict[str, Any]) -> BitproofError:
    kind = getattr(errors, values["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, BitproofError)):
        kind = RankError
    error: BitproofError = kind(**values["facts"])
    return error


def _log_name(log: Path) -> str:
    return str(Path(*log.parts[-2:]))
