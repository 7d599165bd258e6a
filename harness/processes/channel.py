"""A pipe between processes of bitproof. Each message is a line in the format of `framing`."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from typing import Any

from bitproof.harness.processes import framing

_PART = 1 << 16


class Inlet:
    """The receiving end of a pipe. `is_over`: whether all writers have closed the pipe, and everything was read."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.lines: deque[bytes] = deque()
        """Messages that have arrived and that no caller has taken yet."""
        self.is_over = False
        # The parts of a message whose end has not arrived yet.
        self._begun: list[bytes] = []

    # For `select`.
    def fileno(self) -> int:
        return self.fd

    def read(self) -> None:
        """Read all data that have arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            # Empty at the pipe's end. While a writer is left, an empty pipe raises BlockingIOError, and `is_over` stays
            # False.
            while content := os.read(self.fd, _PART):
                *ends, rest = content.split(b"\n")
                for end in ends:
                    self.lines.append(b"".join([*self._begun, end]))
                    self._begun = []
                self._begun.append(rest)
            self.is_over = True

    def wait(self, seconds: float | None) -> bytes | None:
        """Return the next message as a line; None if none arrives within `seconds`, or at the pipe's end."""
        limit = None if seconds is None else time.monotonic() + seconds
        while not self.lines and not self.is_over:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not select.select([self.fd], [], [], left)[0]:
                break
            self.read()
        return self.lines.popleft() if self.lines else None

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd, self.is_over = -1, True


def send(fd: int, message: Any) -> None:
    """Write a whole message into a pipe. Raises BrokenPipeError if nothing reads from the pipe any more."""
    content = memoryview(framing.write(message))
    # A write may take only a part of the message.
    while content:
        content = content[os.write(fd, content) :]
