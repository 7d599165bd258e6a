"""Watch processes together: what they say, that their logs stay short, that they end, and that somebody still waits."""

from __future__ import annotations

import selectors
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bitproof.harness.processes.channel import Inlet
from bitproof.harness.processes.process import keep_short

_EXIT_SECONDS = 0.002
"""From a process's last word to its exit is a moment, and nothing tells of the exit."""


class Watched(Protocol):
    """A process that says messages and ends."""

    inlet: Inlet

    @property
    def log(self) -> Path | None:
        """Where its output goes."""
        ...

    def has_ended(self) -> bool:
        """Whether it has ended."""
        ...


P = TypeVar("P", bound=Watched)


class Watch(Generic[P]):
    """Some processes. It never waits on one of them that may hang: it reads what they say, and keeps the clock.

    `hangup` is a descriptor that hangs up when nobody waits for them any more.
    """

    def __init__(self, processes: Sequence[P], hangup: int | None = None) -> None:
        self._processes = list(processes)
        self._hangup = hangup
        self._selector = selectors.DefaultSelector()
        for process in self._processes:
            self._selector.register(process.inlet, selectors.EVENT_READ)
        if hangup is not None:
            self._selector.register(hangup, selectors.EVENT_READ)

    def __enter__(self) -> Watch[P]:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()

    def look(self, seconds: float) -> Iterator[tuple[P, bytes]]:
        """Wait until one says something, at most so long; then what each has said, and by whom.

        What one that has ended by then said last comes with it. Raises SystemExit when nobody waits any more.
        """
        processes = self._processes
        if any(process.inlet.lines for process in processes):
            seconds = 0.0
        elif any(process.inlet.is_over and not process.has_ended() for process in processes):
            seconds = min(seconds, _EXIT_SECONDS)
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        if self._hangup is not None and self._hangup in ready:
            raise SystemExit("nobody waits for this run any more")
        for process in processes:
            inlet = process.inlet
            if not inlet.is_over and (process.has_ended() or inlet in ready):
                inlet.read()
                if inlet.is_over:
                    self._selector.unregister(inlet)
            if process.log is not None:
                keep_short(process.log)
            while inlet.lines:
                yield process, inlet.lines.popleft()
