r"""Interrupts of a command: a closed terminal, Ctrl-C, Ctrl-\, and SIGTERM, with which CI cancels a job.

All four have the same effect, which depends on what the command is doing. A command that they end has exit status 3.

- During imports, the process ends at once, as there is nothing to clean up (`end_at_once`).
- While a command runs, Interrupt is raised, and all started processes are ended (`raising`).
- In a block that must not be interrupted, Interrupt is raised at the end of the block (`held`).
- Once a command writes its result, an interrupt has no effect (`too_late`).

If the caller made the process ignore a signal, as `nohup` does, the signal stays ignored. This module imports almost
nothing.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
STATUS = 3
MESSAGE = "bitproof: interrupted"

GRACE_SECONDS = 10.0
"""The time, in seconds, in which an interrupt ends the command. A second interrupt has no effect during that time.
Later it is raised again, in case a user's code caught the first."""


class Interrupt(BaseException):
    """An interrupt. It is no KeyboardInterrupt, since the command-line library turns that into status 130."""


STOPS = (Interrupt, KeyboardInterrupt, SystemExit)
"""Exceptions that end a run early without being errors: an interrupt, or its equivalents outside of a command."""


class _Phase(enum.Enum):
    """The effect that an interrupt has now.

    STARTING: it ends the process. OPEN: it raises Interrupt. HELD: it waits. OVER: it has none.
    """

    STARTING = enum.auto()
    OPEN = enum.auto()
    HELD = enum.auto()
    OVER = enum.auto()


class _Watch:
    phase = _Phase.STARTING
    is_waiting = False
    has_come = False
    raised_at = -GRACE_SECONDS


_watch = _Watch()


def end_at_once() -> None:
    """Make interrupts end the process with status 3 from now on. `raising` changes this."""
    _install()


def ignore() -> None:
    """Ignore interrupts until the process ends, so that they do not change its exit status."""
    # First, as a signal may come before the handlers below are changed.
    _watch.phase = _Phase.OVER
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # unlike our handler, this lasts until the process has ended


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Context in which an interrupt raises Interrupt. No effect inside another such context, or outside the main
    thread."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or _watch.phase in (_Phase.OPEN, _Phase.HELD):
        yield
        return
    # An earlier command of this process may have left its state.
    _watch.is_waiting, _watch.has_come, _watch.raised_at = False, False, -GRACE_SECONDS
    _watch.phase = _Phase.OPEN
    previous = _install()
    try:
        yield
    finally:
        _watch.phase = _Phase.OVER
        if any(handler is not _on_signal for handler in previous.values()):  # the process belongs to a caller
            for number, handler in previous.items():
                signal.signal(number, handler)
            _watch.phase = _Phase.STARTING


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Context in which interrupts wait. If one came, Interrupt is raised at the end."""
    before, _watch.phase = _watch.phase, _phase_while_held(_watch.phase)
    try:
        yield
    finally:
        _return_to(before)
    # Not in the `finally`: an error of the block itself is not replaced by the interrupt.
    _raise_waiting()


@contextlib.contextmanager
def let_in() -> Iterator[None]:
    """Context inside `held` in which interrupts do not wait. If one was waiting, Interrupt is raised at the
    beginning."""
    before = _watch.phase
    if before is _Phase.HELD:
        _watch.phase = _Phase.OPEN
    try:
        _raise_waiting()
        yield
    finally:
        _return_to(before)


def too_late() -> None:
    """Ignore interrupts until the command ends: its work is done, and its exit status must match the written report."""
    if _watch.phase in (_Phase.OPEN, _Phase.HELD):
        _watch.phase = _Phase.OVER


def wait(seconds: float) -> None:
    """Sleep for some seconds, or until an interrupt comes, even an ignored interrupt."""
    limit = time.monotonic() + seconds
    # Short sleeps, since a signal whose handler does not raise leaves a sleep running (PEP 475).
    while time.monotonic() < limit and not _watch.has_come:
        time.sleep(0.1)


def _return_to(before: _Phase) -> None:
    # `too_late` may have been called inside the block, and its effect lasts.
    if _watch.phase is not _Phase.OVER:
        _watch.phase = before


def _phase_while_held(phase: _Phase) -> _Phase:
    # In other phases an interrupt raises nothing, so nothing has to wait.
    return _Phase.HELD if phase is _Phase.OPEN else phase


def _raise_waiting() -> None:
    if _watch.is_waiting and _watch.phase is _Phase.OPEN:
        _raise()


def _raise() -> None:
    _watch.is_waiting, _watch.raised_at = False, time.monotonic()
    raise Interrupt


def _on_signal(number: int, frame: FrameType | None) -> None:
    # Nothing is open yet, so nothing has to be cleaned up.
    if _watch.phase is _Phase.STARTING:
        with contextlib.suppress(OSError):
            os.write(2, f"{MESSAGE}\n".encode())
        os._exit(STATUS)
    _watch.has_come = True
    # A second signal must not interrupt the cleanup after the first.
    if _watch.phase is _Phase.OVER or time.monotonic() - _watch.raised_at < GRACE_SECONDS:
        return
    if _watch.phase is _Phase.HELD:
        _watch.is_waiting = True
    else:
        _raise()


def _install() -> dict[signal.Signals, Any]:
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    # A signal that the caller ignores, as under `nohup`, stays ignored.
    handled = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, _on_signal)
    return handled
