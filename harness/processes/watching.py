"""Watch forked processes: read their messages, keep their logs short, and notice when they have ended."""

from __future__ import annotations

import selectors
from collections.abc import Iterator, Sequence

from bitproof.harness.processes.forked import Child
from bitproof.harness.processes.process import keep_short

_EXIT_SECONDS = 0.002
"""How long to wait for the exit of a process that has closed its pipe: it follows soon, and no event announces it."""


class Watch:
    """Watches forked processes, without ever waiting for a process that may hang.

    `hangup` is a descriptor that is closed at its other end when the process that requested the work stops waiting.
    """

    def __init__(self, children: Sequence[Child], hangup: int | None = None) -> None:
        self._children = list(children)
        self._hangup = hangup
        self._selector = selectors.DefaultSelector()
        for child in self._children:
            self._selector.register(child.inlet, selectors.EVENT_READ)
        if hangup is not None:
            self._selector.register(hangup, selectors.EVENT_READ)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()

    @property
    def is_over(self) -> bool:
        """Whether all processes have ended, and all their messages were read."""
        return all(child.status is not None for child in self._children)

    def look(self, seconds: float) -> Iterator[tuple[Child, bytes]]:
        """Wait at most `seconds` for messages, and yield each with the process that sent it.

        Once a process has an exit status, all of its messages have been yielded. Raises SystemExit if nothing waits for
        the work any more (`hangup`).
        """
        children = self._children
        leaving = [child for child in children if child.inlet.is_over and child.status is None]
        # A list in the second `any`, so that every child that has ended is reaped.
        if any(child.inlet.lines for child in children) or any([child.has_ended() for child in leaving]):
            seconds = 0.0
        elif leaving:
            seconds = min(seconds, _EXIT_SECONDS)
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        if self._hangup is not None and self._hangup in ready:
            raise SystemExit("nothing waits for this run any more")
        for child in children:
            inlet = child.inlet
            # In this order: a child that had ended before the read cannot write anything after it.
            if not inlet.is_over and (child.has_ended() or inlet in ready):
                inlet.read()
                if inlet.is_over:
                    self._selector.unregister(inlet)
            if child.log is not None:
                keep_short(child.log)
            while inlet.lines:
                yield child, inlet.lines.popleft()
