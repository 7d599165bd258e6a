"""One host for the runs of many tests, where each run would start its own and import torch for two seconds."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

import psutil
import pytest

from bitproof.harness.errors import BitproofError
from bitproof.harness.execute import session
from bitproof.harness.execute.host_process import HostProcess
from bitproof.harness.execute.requests import Request
from bitproof.harness.options import OnEvent

A = TypeVar("A")

ROOT = Path(__file__).parents[1]
# As no test has patched them yet.
ENVIRONMENT = dict(os.environ)
TEMPORARY = tempfile.gettempdir()


class SharedHost:
    """What a session takes for a host of its own: that of this process, which stays when the session ends.

    One that was lost, or that somebody left in the middle of a request, is replaced. It inherits nothing from a test,
    `nothing_left_behind` does not see it, and it takes one request after another: tests of what a host inherits or
    leaves, and of what goes at once, need hosts of their own.
    """

    _host: ClassVar[HostProcess | None] = None
    _is_asked: ClassVar[threading.Lock] = threading.Lock()
    _folder: ClassVar[Path | None] = None

    def __init__(self, log: Path, *, temporary: Path | None = None, verbose: bool = False) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()

    def ask(
        self, request: Request[A], timeout: float, on_event: OnEvent, is_abandoned: Callable[[], bool] = lambda: False
    ) -> A:
        """As `HostProcess.ask` does."""
        with self._is_asked:
            try:
                return self.started().ask(request, timeout, on_event, is_abandoned)
            except BitproofError:  # an answer
                raise
            except BaseException:
                self.end()
                raise

    def end_if_idle(self) -> None:
        """Nothing: it stays."""

    def kill(self) -> None:
        """Nothing, as what is at work has been ended in `ask`."""

    @classmethod
    def started(cls) -> HostProcess:
        """The host, of which there is one from now on."""
        if cls._host is None:
            cls._folder = Path(tempfile.mkdtemp(prefix="bitproof-test-host-", dir=TEMPORARY))
            with pytest.MonkeyPatch.context() as patch, contextlib.chdir(ROOT):
                patch.setattr(os, "environ", ENVIRONMENT)
                cls._host = HostProcess(cls._folder / "host.log", temporary=cls._folder)
        return cls._host

    @classmethod
    def pids(cls) -> set[int]:
        """The host's own process, if there is one."""
        return {cls._host._process.pid} if cls._host is not None else set()

    @classmethod
    def below(cls) -> set[int]:
        """The processes below the host, in whatever session."""
        host = cls._host._process.pid if cls._host is not None else None
        return {child.pid for child in psutil.Process(host).children(recursive=True)} if host else set()

    @classmethod
    def end(cls) -> None:
        """End the host, if there is one, with all that it has started and left."""
        if cls._host is not None and cls._folder is not None:
            cls._host.kill()
            shutil.rmtree(cls._folder, ignore_errors=True)
        cls._host = None


@contextlib.contextmanager
def nothing_left_below_the_host() -> Iterator[None]:
    """Check that the host has no process below it in the end that it did not have before."""
    SharedHost.started()
    before = SharedHost.below()
    yield
    limit = time.monotonic() + 20
    while (left := SharedHost.below() - before) and time.monotonic() < limit:
        time.sleep(0.05)
    assert left == set()


@contextlib.contextmanager
def one_host() -> Iterator[None]:
    """Have all sessions within ask the host of this process, whose runs are otherwise as any others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "HostProcess", SharedHost)
        yield
