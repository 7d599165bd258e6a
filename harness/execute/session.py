"""What all cases of one call share: the host that runs systems, and a temporary folder.

However a session ends, by its own end, an error or an interrupt, it leaves no process and no file.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from harness.case import Case
from harness.errors import RankError
from harness.execute.host_process import HostLost, HostProcess
from harness.execute.requests import MachineRequest, Request
from harness.machine.devices import Placement, place
from harness.options import OnEvent, RunOptions
from harness.program import interrupts
from harness.records import CaseResult

START_TIMEOUT = 120.0

A = TypeVar("A")


class Desk(Protocol):
    """What a case asks to run its systems, as `transport.open_desk` chose it: a session, or rank 0 of torchrun's."""

    run_dir: Path
    work: Path

    def place(self, case: Case) -> Placement:
        """Where a case runs. Raises CaseError when it does not fit."""
        ...

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """A request's answer within `timeout` seconds; raises BitproofError."""
        ...

    def announce(self, result: CaseResult) -> None:
        """Tell a case's result to those who follow."""
        ...


class Session:
    """The host and the temporary folder that all cases of one call share.

    A host that crashed takes every later case with it: the machine or the installation is to blame. One
    that was killed because a case outlasted its time is replaced.
    """

    def __init__(self, run_dir: Path, options: RunOptions) -> None:
        self.run_dir = run_dir
        self.options = options
        self.work = Path(tempfile.mkdtemp(prefix="bitproof-"))
        self._crash: RankError | None = None
        self._num_gpus: int | None = None
        self._host = self._start()

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """One request to the host; after it crashed, the same error for every further one."""
        if self._crash is not None:
            raise self._crash
        try:
            return self._host.ask(request, timeout, on_event)
        except HostLost as lost:
            if lost.silent:
                self._host = self._start()
            else:
                self._crash = lost.error
            raise lost.error from lost

    def place(self, case: Case) -> Placement:
        """Where a case runs. Raises CaseError when it does not fit the machine."""
        if self._num_gpus is None and self.options.device != "cpu":
            with contextlib.suppress(RankError):  # a host that cannot start says so again, as each case's result
                self._num_gpus = self.ask(MachineRequest(), START_TIMEOUT).gpus
        options = self.options
        ranks, num_gpus = case.parallelism.world_size, self._num_gpus or 0
        return place(options.device, ranks, num_gpus, options.collectives, share_gpus=options.share_gpus)

    def announce(self, result: CaseResult) -> None:
        """Nobody follows."""

    def close(self) -> None:
        """End the host and remove the temporary folder: all that a host and its stages leave lies in there."""
        self._host.kill()
        shutil.rmtree(self.work, ignore_errors=True)

    def _start(self) -> HostProcess:
        try:
            return HostProcess(self.run_dir / "logs" / "host.log", temporary=self.work, verbose=self.options.verbose)
        except BaseException:
            shutil.rmtree(self.work, ignore_errors=True)
            raise


@contextlib.contextmanager
def open_session(run_dir: Path, options: RunOptions) -> Iterator[Session]:
    """A session, ended however the block ends; SIGTERM unwinds it as an interrupt does."""
    session = None
    with _sigterm_raises():
        try:
            with interrupts.held():  # between a folder or a process that was made and knowing of it
                session = Session(run_dir, options)
            yield session
        finally:
            if session is not None:
                with interrupts.held():
                    session.close()


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM unwind this process as an interrupt does, so that what it started is ended."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # a caller that handles SIGTERM unwinds by itself
        return

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
