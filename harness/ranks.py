"""Fork a run's ranks, watch them, and end them all when one fails or time is up.

A rank tells its steps and its end through a pipe of its own. The watcher never waits on a rank that
may hang: it reads pipes, reaps exits, and keeps the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import RankError
from harness.failures import (
    Failure,
    blame,
    error_of_failure,
    error_of_hang,
    failure_of_exception,
    failure_of_exit,
    tail,
)
from harness.process import die_with_parent, keep_to_one_core, redirect_output
from harness.worker import Job, run_rank

GRACE_SECONDS = 0.5
SECONDARY_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.2
_NUM_STACKS = 4

OnEvent = Callable[[dict[str, Any]], None]


@dataclass
class Rank:
    """One forked rank, as the watcher sees it."""

    rank: int
    pid: int
    pipe: int
    log: Path
    place: str = "at its start"
    step: int = -1
    received: bytes = b""
    graph: dict[str, Any] | None = None
    done: dict[str, Any] | None = None
    exited: bool = False
    failure: Failure | None = None


@dataclass
class Ranks:
    """All ranks of one run. `watch` returns each rank's own account of its end, in rank order."""

    job: Job
    log_of: Callable[[int], Path]
    on_event: OnEvent
    ranks: list[Rank] = field(default_factory=list)
    ready: int = 0
    start_seconds: float = 0.0

    def run(self, store_path: Path, hangup: int | None = None) -> list[dict[str, Any]]:
        """Fork the ranks and watch them to their end; none is alive afterwards, whatever happens.

        Raises RankError for the rank to blame, or for a run that outlasts the job's timeout, and
        SystemExit when the file descriptor `hangup` hangs up: then nobody waits for the result.
        """
        began = time.monotonic()
        store_path.parent.mkdir(parents=True, exist_ok=True)  # a FileStore waits forever for a folder that is not there
        self.log_of(0).parent.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(self.job.case.parallelism.world_size):
                self.ranks.append(self._fork(rank, store_path))
            return self._watch(began, hangup)
        finally:
            self._kill()

    def _fork(self, rank: int, store_path: Path) -> Rank:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        host, pid = os.getpid(), os.fork()
        if pid == 0:
            for other in self.ranks:
                os.close(other.pipe)
            os.close(reader)
            _run_child(self.job, rank, store_path, self.log_of(rank), writer, host)
        os.close(writer)
        os.set_blocking(reader, False)
        return Rank(rank, pid, reader, self.log_of(rank))

    def _watch(self, began: float, hangup: int | None) -> list[dict[str, Any]]:
        deadline = began + self.job.timeout
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.pipe, selectors.EVENT_READ, rank)
            if hangup is not None:
                selector.register(hangup, selectors.EVENT_READ, None)
            while not all(rank.exited for rank in self.ranks):
                for event, _ in selector.select(_POLL_SECONDS):
                    if event.data is None:
                        raise SystemExit("nobody waits for this run any more")
                    if not self._read(event.data, began):
                        selector.unregister(event.fd)
                self._reap(began)
                limit = self._limit_of_grace()
                if limit is not None and time.monotonic() >= limit:
                    break
                if limit is None and time.monotonic() >= deadline:
                    raise self._hang()
        if failures := self._failures():
            raise self._error(blame(failures))
        return [rank.done for rank in self.ranks if rank.done is not None]

    def _read(self, rank: Rank, began: float) -> bool:
        """Take all that a rank has told so far; False when it will tell no more."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(rank.pipe, 1 << 16):
                *lines, rank.received = (rank.received + content).split(b"\n")
                for line in lines:
                    self._take(rank, json.loads(line), began)
            return False
        return True

    def _take(self, rank: Rank, event: dict[str, Any], began: float) -> None:
        match event:
            case {"event": "prepared", "graph": graph}:
                rank.graph = graph
                self._check_one_graph(rank)
            case {"event": "ready"}:
                self.ready += 1
                self.start_seconds = time.monotonic() - began
            case {"event": "step", "step": step}:
                rank.step, rank.place = step, f"at step {step}"
                if rank.rank == 0:
                    self.on_event({"event": "step", "step": step, "steps": self.job.steps})
            case {"event": "end"}:
                rank.place = "at the end"
            case {"event": "done"}:
                rank.done = event
            case {"event": "failed", "failure": failure}:
                rank.failure = rank.failure or Failure(**failure)

    def _check_one_graph(self, rank: Rank) -> None:
        """Ranks that run different graphs compute different things, or wait for each other forever."""
        hashes = {r.rank: r.graph["code_hash"] for r in self.ranks if r.graph is not None}
        first = next(iter(hashes), rank.rank)
        if rank.rank in hashes and hashes[rank.rank] != hashes[first]:
            rank.failure = Failure(
                rank=rank.rank,
                time=time.monotonic(),
                what=f"prepared another graph than rank {first}",
                found=f"code hash {hashes[rank.rank]}, not {hashes[first]}",
            )

    def _reap(self, began: float) -> None:
        for rank in self.ranks:
            if rank.exited:
                continue
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            rank.exited = True
            self._read(rank, began)
            code = os.waitstatus_to_exitcode(status)
            if rank.failure is None and (code != 0 or rank.done is None):
                rank.failure = failure_of_exit(rank.rank, code, rank.log)

    def _failures(self) -> list[Failure]:
        return [rank.failure for rank in self.ranks if rank.failure is not None]

    def _limit_of_grace(self) -> float | None:
        """Until when other ranks may still show that they failed first; None while nobody failed."""
        failures = self._failures()
        if not failures:
            return None
        grace = SECONDARY_GRACE_SECONDS if all(failure.secondary for failure in failures) else GRACE_SECONDS
        return min(failure.time for failure in failures) + grace

    def _error(self, failure: Failure) -> RankError:
        rank = self.ranks[failure.rank]
        return error_of_failure(failure, self.job.system, rank.place, _log_name(rank.log))

    def _hang(self) -> RankError:
        """Ask every rank that lags for its stack, and tell."""
        unfinished = [rank for rank in self.ranks if rank.place != "at the end" and not rank.exited]
        unfinished = unfinished or [rank for rank in self.ranks if not rank.exited]
        for rank in unfinished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.5)
        last = min(rank.step for rank in unfinished)
        lagging = [rank for rank in unfinished if rank.step == last]
        stacks = [f"rank {rank.rank}, {_log_name(rank.log)}:\n{_stack(rank.log)}" for rank in lagging[:_NUM_STACKS]]
        if len(lagging) > _NUM_STACKS:
            stacks.append(f"and {len(lagging) - _NUM_STACKS} more ranks, in their logs")
        places = {rank.rank: rank.place for rank in unfinished}
        return error_of_hang(self.job.system, self.job.case_timeout, places, "\n\n".join(stacks))

    def _kill(self) -> None:
        for rank in self.ranks:
            if not rank.exited:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            if not rank.exited:
                os.waitpid(rank.pid, 0)
                rank.exited = True
            os.close(rank.pipe)


def _run_child(job: Job, rank: int, store_path: Path, log: Path, writer: int, host: int) -> NoReturn:
    """The forked rank, from its first line to its exit. It never returns into the host's frames."""
    status = 1
    try:
        die_with_parent(host)
        keep_to_one_core(rank, job.case.parallelism.world_size)
        redirect_output(log)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        status = _run_reporting(job, rank, store_path, writer)
    finally:
        with contextlib.suppress(BaseException):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run_reporting(job: Job, rank: int, store_path: Path, writer: int) -> int:
    def report(event: dict[str, Any]) -> None:
        content = memoryview(json.dumps(event).encode() + b"\n")
        while content:
            content = content[os.write(writer, content) :]

    try:
        from torch._C._distributed_c10d import FileStore

        store = FileStore(str(store_path), job.case.parallelism.world_size)
        run_rank(job, rank, store, report)
    except BaseException as error:
        failure = failure_of_exception(rank, error)
        print(failure.details, file=sys.stderr, flush=True)
        report({"event": "failed", "failure": dataclasses.asdict(failure)})
        return 1
    return 0


def _stack(log: Path) -> str:
    """The newest stack dump in a rank's log, innermost call first, without the host's frames that it was forked in."""
    text = tail(log, lines=200)
    _, found, dump = text.rpartition("most recent call first")
    frames = dump.splitlines()[1:] if found else []
    outer = [index for index, frame in enumerate(frames) if frame.endswith("in _run_reporting")]
    return "\n".join(frames[: outer[0]] if outer else frames[:20]) or tail(log, lines=15)


def _log_name(log: Path) -> str:
    """A log's path within the run folder."""
    return str(Path(*log.parts[-4:])) if "logs" in log.parts[-4:-3] else str(log)
