"""Start a module of bitproof as a separate process, so that the caller need not load torch, or can kill the process.

- The process reads requests from its standard input, and its output goes to a log.
- It answers through a separate pipe, which a stray print of a library cannot damage.
- It has its own session, so Ctrl-C only reaches its parent, which ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.processes import framing
from bitproof.harness.processes.channel import Inlet

START = str(Path(__file__).parents[1] / "runtime" / "start.py")


class Started:
    """A process that runs `MODULE FD ARGUMENTS...` and answers through the descriptor FD.

    It is ended together with all processes of its group.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], *, log: Path, environment: dict[str, str] | None = None
    ) -> None:
        """Start the process, with additional environment variables. It ends at the latest when this process ends."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", START, module, str(writer), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writer],
                    env=os.environ | _search_path() | (environment or {}),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            raise
        # The child has its own copy. The pipe must end with the child, so this copy is closed.
        finally:
            os.close(writer)
        self.inlet = Inlet(reader)
        atexit.register(self.kill)

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def send(self, message: Any) -> None:
        """Send a message to the process. Raises OSError if the process reads no more."""
        assert self._process.stdin is not None, "it has a pipe for one"
        self._process.stdin.write(framing.write(message))
        self._process.stdin.flush()

    def close_requests(self) -> None:
        """Close the standard input of the process: it gets no further requests."""
        assert self._process.stdin is not None, "it has a pipe for one"
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def has_ended(self) -> bool:
        """Return whether the process has ended. Does not reap it."""
        if self._process.returncode is not None:
            return True
        # With WNOWAIT the process stays a zombie, so that no new process or group gets its id.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < limit:
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill_without_waiting(self) -> None:
        """Kill the process and its group without waiting: freeing the memory of a large process takes a while."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its group, wait for its end, and close the pipes to it. A second call does nothing."""
        atexit.unregister(self.kill)
        if self._process.returncode is None:
            self.kill_without_waiting()
            self._process.wait()
        self.close_requests()
        self.inlet.close()


def _search_path() -> dict[str, str]:
    # The new process must find the same modules, also in folders that were added since this process started.
    found = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    if sys.flags.safe_path:  # perhaps set by `-P`, which a new process does not inherit
        found["PYTHONSAFEPATH"] = "1"
    return found
