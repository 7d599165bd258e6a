"""Stages: forked processes that trace steps and run graph passes, so that the host process need not.

In the host process, from which later ranks are forked, this would do harm:

- Tracing runs autograd, which starts threads if torch knows of devices. A process that is forked afterwards cannot run
  backward.
- A pass may change any state of its process.

The host sends requests to a stage as lines of JSON, and receives events and an answer.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from bitproof.harness.errors import RankError
from bitproof.harness.execute.failures import Problem, describe_exit, log_name, stack_of, tail
from bitproof.harness.execute.requests import REQUESTS, AnyRequest, Request
from bitproof.harness.options import OnEvent
from bitproof.harness.processes import framing
from bitproof.harness.processes.forked import ask_for_stacks, fork_asked
from bitproof.harness.processes.process import adopt_orphans
from bitproof.harness.processes.watching import Watch
from bitproof.harness.records import Event

A = TypeVar("A")


@dataclass(frozen=True)
class StagePlace:
    """The current activity of a stage, in words such as "in pass chunk"; "" once ranks run.

    While ranks run, the stage itself checks the time limit.
    """

    place: str


Send = Callable[[Event | StagePlace], None]
Answer = Callable[[AnyRequest, Send, int], Any]
"""A function that answers requests in a stage; it returns None if no answer is expected.

Its arguments are the request, a function that sends events, and a file descriptor that hangs up when the
process that needs the answer stops waiting.
"""

# How long a stage with ranks may take, after the time is up, to report their state.
_MARGIN = 5.0
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0


class Stage:
    """A forked process that answers requests, as seen by its parent.

    Its output goes to the file `log`, or to the parent's output if `log` is None. With `adds_to_log`, output is
    appended to the file; otherwise the file is emptied at the start.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        log: Path | None = None,
        end: Callable[[], None] = lambda: None,
        adds_to_log: bool = False,
    ) -> None:
        """Fork the stage. In the new process, `answer` is called for each request, and `end` after the last request."""

        def live(to_parent: Callable[[Any], None], requests: int) -> None:
            adopt_orphans()
            _answer_all(answer, requests, to_parent)
            end()
            gc.collect()  # objects with temporary files remove them

        self._child = fork_asked(live, log=log, adds=adds_to_log)
        self._log = log
        self._place = ""

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
        """Send a request to the stage and return its answer. Events before the answer go to `send`.

        - `what`: the name of the work, for errors.
        - `timeout`: the time limit in seconds.
        - `case_timeout`: the time limit of the whole case, which errors state.
        - `hangup`: a file descriptor. If it hangs up, SystemExit is raised.

        Raises the BitproofError that is the answer, and RankError if the stage ends or exceeds the time limit.
        """
        began, self._place = time.monotonic(), "at its start"
        self.send(request)
        child = self._child
        with Watch([child], hangup) as watch:
            while True:
                for _, line in watch.look(_POLL_SECONDS):
                    match self._read(line, what, Event, StagePlace, Problem, request.answer):
                        case Event() as event:
                            send(event)
                        case StagePlace(place):
                            self._place = place
                        case Problem() as problem:
                            raise problem.error()
                        case answer:
                            return cast(A, answer)
                if child.inlet.is_over:  # a pass may close any descriptor; without it, no answer comes
                    child.wait(_POLL_SECONDS)
                    child.kill()
                if child.status is not None:
                    raise self._crash_error(what)
                # A stage that watches its ranks reports a hang itself, with their stacks: it gets a margin for that.
                if time.monotonic() >= began + timeout + (0.0 if self._place else _MARGIN):
                    raise self._timeout_error(what, case_timeout)

    def send(self, request: Request[Any]) -> None:
        """Send a request without waiting for an answer."""
        self._child.send(request)

    def close(self) -> None:
        """End the stage: wait a moment for it to end by itself, then kill it and, on Linux, the ranks that it
        forked."""
        self._child.close_requests()
        self._child.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the stage now. Does nothing if it has ended."""
        self._child.kill()

    def _read(self, line: bytes, what: str, *kinds: type) -> Any:
        try:
            return framing.read(line, *kinds)
        except ValueError as error:  # a pass found the pipe
            raise RankError(
                f"the process that makes {what} wrote into bitproof's own pipe, {self._place or 'while its ranks ran'}",
                found=str(error),
                where=log_name(self._log) if self._log else None,
            ) from None

    def _crash_error(self, what: str) -> RankError:
        assert self._child.status is not None, "it has ended"
        return RankError(
            f"the process that makes {what} {describe_exit(self._child.status)}, "
            f"{self._place or 'while its ranks ran'}",
            where=log_name(self._log) if self._log else None,
            traceback=(tail(self._log) or None) if self._log else None,
        )

    def _timeout_error(self, what: str, case_timeout: float) -> RankError:
        # First, as the error's traceback is read from the log, into which the stage writes its stack.
        ask_for_stacks([self._child.pid])
        return RankError(
            f"{what} was not finished: the case ran longer than {case_timeout:g} s",
            expected="the step to be traced, and every pass to finish",
            found=f"the passes had not finished: {self._place}" if self._place else "its ranks ran, and ended too late",
            where=log_name(self._log) if self._log else None,
            fix="see below where it was; if it was only slow, give a longer --timeout",
            traceback=stack_of(self._log, _answer_all.__name__) if self._log else None,
        )


def _answer_all(answer: Answer, requests: int, to_parent: Callable[[Any], None]) -> None:
    with open(requests, "rb", closefd=False) as lines:
        for line in lines:
            request: AnyRequest = framing.read(line, *REQUESTS)
            try:
                found = answer(request, to_parent, requests)
            except BaseException as error:  # a pass may raise any exception, SystemExit included
                traceback.print_exc()
                to_parent(Problem.of(error, request.about))
            else:
                if found is not None:
                    to_parent(found)
