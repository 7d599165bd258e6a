"""A session: a host process, which runs systems, and a temporary folder, which all cases of a command share.

Concurrent cases have a session each. A session leaves no process and no file behind, even after an error.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from bitproof.harness.case import Case
from bitproof.harness.errors import RankError
from bitproof.harness.execute.host_process import Abandoned, HostLost, HostProcess
from bitproof.harness.execute.requests import MachineRequest, Request
from bitproof.harness.machine.devices import Placement, place
from bitproof.harness.options import OnEvent, RunOptions
from bitproof.harness.records import CaseResult
from bitproof.harness.runtime import interrupts
from bitproof.harness.runtime.work_folder import make_work_folder, remove_work_folder

START_TIMEOUT = 120.0

A = TypeVar("A")


class Client(Protocol):
    """Sends a case's requests to host processes: a session on this machine or, under torchrun, the client of rank 0.

    `transport.open_client` makes it.
    """

    run_dir: Path
    work: Path

    def place(self, case: Case) -> Placement:
        """Return the device and backend of a case. Raises CaseError if the case does not fit the machine."""
        ...

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """Send a request and return its answer. Raises BitproofError if it fails or takes longer than `timeout`
        seconds."""
        ...

    def announce(self, result: CaseResult) -> None:
        """Send a case's result to torchrun's other ranks, if there are any."""
        ...


class Session:
    """A host process and a temporary folder for a command's cases. `another` opens more sessions, for concurrent cases.

    If a host process crashes, all later cases fail. A host process that exceeds a case's time limit is killed, and a
    new one is started.
    """

    def __init__(
        self, run_dir: Path, options: RunOptions, log: str = "host.log", crashes: list[RankError] | None = None
    ) -> None:
        """Open the session. `crashes`: a list of the crashes of all host processes of the command, which all its
        sessions share and append to.
        """
        self.run_dir = run_dir
        self.options = options
        self.work = make_work_folder()
        self._others: list[Session] = []
        self._log = run_dir / "logs" / log
        self._crashes: list[RankError] = [] if crashes is None else crashes
        self._crash: RankError | None = None
        self._num_gpus: int | None = None
        # Set by another thread than the thread that waits for an answer.
        self._has_ended = threading.Event()
        self.host: HostProcess | None = self._start()

    def another(self) -> Session:
        """Open a further session, which has its own host process. Closing this session closes the further session, too.

        Call it in the main thread only.
        """
        with interrupts.held():  # as in `open_session`
            made = Session(self.run_dir, self.options, f"host{len(self._others) + 2}.log", self._crashes)
            self._others.append(made)
        return made

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """Send a request to the host process and return the answer.

        Raises the request's error, or the error of an earlier crash of the host process. After `end`, raises Abandoned.
        """
        if self._has_ended.is_set():
            raise Abandoned
        if self._crash is not None:
            raise self._crash
        self.host = self.host or self._start()
        try:
            return self.host.ask(request, timeout, on_event, self._has_ended.is_set)
        # The host was killed together with the request.
        except Abandoned:
            self.host = None
            raise
        except HostLost as lost:
            # A silent host was killed, so a new host may succeed. A crashed host would crash again.
            self.host = self._start() if lost.silent else None
            if not lost.silent:
                self._crash = lost.error
                self._crashes.append(lost.error)
            raise lost.error from lost

    def begin_case(self) -> None:
        """Begin a case. If any host process of this command has crashed, each request of this case raises the error of
        that crash.
        """
        self._crash = next(iter(self._crashes), None)

    def end(self) -> None:
        """Refuse further requests. If another thread waits for an answer, raise Abandoned there."""
        self._has_ended.set()

    def place(self, case: Case) -> Placement:
        if self._num_gpus is None and self.options.device != "cpu":
            with contextlib.suppress(RankError):  # a host that cannot start fails each case again, with the same error
                self._num_gpus = self.ask(MachineRequest(), START_TIMEOUT).gpus
        options = self.options
        ranks, num_gpus = case.most_ranks, self._num_gpus or 0
        return place(options.device, ranks, num_gpus, options.collectives, share_gpus=options.share_gpus)

    def announce(self, result: CaseResult) -> None:
        """Do nothing, because a session has no other ranks to which to send the result."""

    def close(self) -> None:
        """End the host processes of this session and of the sessions that `another` opened, and remove their temporary
        folders."""
        hosts = [session.host for session in (self, *self._others) if session.host is not None]
        # First let all idle hosts end at the same time, then kill those that are left.
        for host in hosts:
            host.end_if_idle()
        for host in hosts:
            host.kill()
        for session in (self, *self._others):
            remove_work_folder(session.work)

    def _start(self) -> HostProcess:
        try:
            return HostProcess(self._log, temporary=self.work, verbose=self.options.verbose)
        except BaseException:
            remove_work_folder(self.work)
            raise


@contextlib.contextmanager
def open_session(run_dir: Path, options: RunOptions) -> Iterator[Session]:
    """Context with an open session, which is closed at the end, even after an error, an interrupt or SIGTERM."""
    session = None
    with _sigterm_raises():
        try:
            with interrupts.held():  # no interrupt between creating a folder or process and storing it
                session = Session(run_dir, options)
            yield session
        finally:
            if session is not None:
                with interrupts.held():
                    session.close()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # a caller that handles SIGTERM unwinds by itself
        return

    def stop(number: int, frame: object) -> None:
        # SystemExit unwinds the stack, so descendants are ended as after an interrupt.
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        # A generator may be closed in another thread, where Python allows no change of handlers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
