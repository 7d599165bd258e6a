"""A forked process for what may not happen in the host: tracing, which runs autograd, and other people's passes.

Autograd starts threads where torch knows of devices, and a process that is forked from one with such threads cannot
run backward. A pass may change whatever the process has. So the host, from which references, controls and later cases
are forked, does neither: it asks a stage, by a JSON request a line, and hears events and one answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from bitproof.harness.errors import RankError
from bitproof.harness.execute import wire
from bitproof.harness.execute.failures import Problem, log_name, stack_of, tail, tell_exit
from bitproof.harness.execute.process import (
    adopt_orphans,
    close_kept,
    close_private,
    die_with_parent,
    keep_private,
    keep_short,
    redirect_output,
)
from bitproof.harness.execute.requests import REQUESTS, AnyRequest, Request
from bitproof.harness.options import OnEvent
from bitproof.harness.records import Event

A = TypeVar("A")


@dataclass(frozen=True)
class Place:
    """Where a stage is, in words such as "in pass chunk"; "" once it watches its own time."""

    place: str


Send = Callable[[Event | Place], None]
Answer = Callable[[AnyRequest, Send, int], Any]
"""Answers a request; it is given what to send events with, and a descriptor that hangs up when nobody listens.

None is no answer: nobody waits for one.
"""

# After the time is up, how long a stage that watches its ranks may take to say where they were.
_MARGIN = 5.0
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0


class Stage:
    """One forked process, as the one that forked it sees it. `log` takes its output, else that stays where it goes.

    With `adds_to_log` it writes behind what the log has.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        log: Path | None = None,
        end: Callable[[], None] = lambda: None,
        adds_to_log: bool = False,
    ) -> None:
        """Fork. In there `answer` is called for each request, and `end` after the last."""
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent, self._pid = os.getpid(), os.fork()
        if self._pid == 0:
            os.close(self._requests)
            os.close(self._answers)
            _serve(answer, end, requests, answers, log, parent, adds_to_log)
        os.close(requests)
        os.close(answers)
        keep_private(self._requests)
        keep_private(self._answers)
        self._log = log
        self._place = ""
        self._received = b""
        self._status: int | None = None

    def ask(
        self,
        request: Request[A],
        send: OnEvent,
        *,
        what: str,
        timeout: float = float("inf"),
        case_timeout: float = float("inf"),
        hangup: int | None = None,
    ) -> A:
        """Have a request answered within `timeout` seconds, what is left of `case_timeout`; events go to `send`.

        Raises the BitproofError that is answered, and RankError, naming `what` and where the stage was, when the stage
        ends or is late; SystemExit when the descriptor `hangup` hangs up: then nobody waits for the answer.
        """
        began, self._place = time.monotonic(), "at its start"
        self.tell(request)
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if hangup is not None:
                selector.register(hangup, selectors.EVENT_READ)
            while True:
                ready = {event.fd for event, _ in selector.select(_POLL_SECONDS)}
                if hangup in ready:
                    raise SystemExit("nobody waits for this run any more")
                ended = self._has_ended()  # before what it said last is read
                if self._log:
                    keep_short(self._log)
                for line in self._lines() if self._answers in ready else ():
                    match self._read(line, what, Event, Place, Problem, request.answer):
                        case Event() as event:
                            send(event)
                        case Place(place):
                            self._place = place
                        case Problem() as problem:
                            raise problem.error()
                        case answer:
                            return cast(A, answer)
                if ended:
                    raise self._crash(what)
                if time.monotonic() >= began + timeout + (0.0 if self._place else _MARGIN):
                    raise self._silence(what, case_timeout)

    def tell(self, request: Request[Any]) -> None:
        """Send a request, and wait for nothing."""
        with contextlib.suppress(BrokenPipeError), open(self._requests, "wb", closefd=False) as pipe:
            pipe.write(wire.write(request))

    def close(self) -> None:
        """Let the stage end by itself for a moment, then kill it, and with it, on Linux, the ranks that it forked."""
        close_kept(self._requests)
        self._wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the stage now. Harmless when done before."""
        if not self._has_ended():
            os.kill(self._pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        close_kept(self._requests)
        close_kept(self._answers)

    def _wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < limit:
            time.sleep(0.005)

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None

    def _lines(self) -> list[bytes]:
        """What the stage has said by now, as far as it is whole."""
        content = os.read(self._answers, 1 << 16)
        if not content:  # a pass may close what it likes, too: a stage that cannot answer is at its end
            self._wait(_POLL_SECONDS)
            self.kill()
        *lines, self._received = (self._received + content).split(b"\n")
        return lines

    def _read(self, line: bytes, what: str, *kinds: type) -> Any:
        try:
            return wire.read(line, *kinds)
        except ValueError as error:  # a pass found the pipe
            raise RankError(
                f"the process that makes {what} wrote into bitproof's own pipe, {self._place or 'while its ranks ran'}",
                found=str(error),
                where=log_name(self._log) if self._log else None,
            ) from None

    def _crash(self, what: str) -> RankError:
        assert self._status is not None, "it has ended"
        return RankError(
            f"the process that makes {what} {tell_exit(self._status)}, {self._place or 'while its ranks ran'}",
            where=log_name(self._log) if self._log else None,
            traceback=(tail(self._log) or None) if self._log else None,
        )

    def _silence(self, what: str, case_timeout: float) -> RankError:
        """Ask the stage for its stack, and tell."""
        os.kill(self._pid, signal.SIGUSR1)
        time.sleep(0.5)
        return RankError(
            f"{what} was not finished: the case ran longer than {case_timeout:g} s",
            expected="the step to be traced, and every pass to finish",
            found=f"the passes had not finished: {self._place}" if self._place else "its ranks ran, and ended too late",
            where=log_name(self._log) if self._log else None,
            fix="see below where it was; if it was only slow, give a longer --timeout",
            traceback=stack_of(self._log, _answer_all.__name__) if self._log else None,
        )


def _serve(
    answer: Answer,
    end: Callable[[], None],
    requests: int,
    answers: int,
    log: Path | None,
    parent: int,
    adds_to_log: bool,
) -> NoReturn:
    """The forked process, from its first line to its exit. It never returns into the host's frames."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        adopt_orphans()
        close_private()
        keep_private(requests)
        keep_private(answers)
        if log is not None:
            redirect_output(log, adds=adds_to_log)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        _answer_all(answer, requests, answers)
        end()
        gc.collect()  # what has files of its own removes them
        status = 0
    finally:
        with contextlib.suppress(BaseException):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _answer_all(answer: Answer, requests: int, answers: int) -> None:
    def send(message: Any) -> None:
        content = memoryview(wire.write(message))
        while content:
            content = content[os.write(answers, content) :]

    with open(requests, "rb", closefd=False) as lines:
        for line in lines:
            request: AnyRequest = wire.read(line, *REQUESTS)
            try:
                found = answer(request, send, requests)
            except BaseException as error:  # a pass may raise whatever it likes, SystemExit included
                traceback.print_exc()
                send(Problem.of(error, request.about))
            else:
                if found is not None:
                    send(found)
