"""Fork a host process's ranks of a run, watch them, and end all of them if a rank fails or time is up.

Ranks report through pipes. The watching process never waits for a single rank, which may hang.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from traceback import FrameSummary, extract_stack
from typing import TYPE_CHECKING

from bitproof.harness import within_user_code
from bitproof.harness.execute.failures import (
    Failure,
    blame,
    failure_of_exception,
    failure_of_exit,
    failure_of_unknown_message,
    log_name,
    stack_of,
)
from bitproof.harness.execute.host.job import Job
from bitproof.harness.execute.host.worker import run_rank
from bitproof.harness.execute.instruments.profile import profiled
from bitproof.harness.execute.requests import RankSlots
from bitproof.harness.execute.status_messages import (
    STATUS_MESSAGES,
    Account,
    Done,
    End,
    Prepared,
    PreparedGraph,
    Ready,
    StepBegan,
    StepsEnded,
)
from bitproof.harness.options import OnEvent
from bitproof.harness.processes import framing
from bitproof.harness.processes.forked import Child, Send, ask_for_stacks, fork
from bitproof.harness.processes.process import children, end_children, keep_to_one_core
from bitproof.harness.processes.watching import Watch
from bitproof.harness.records import Event
from bitproof.harness.runtime.launched import FORKED
from bitproof.harness.shared_memory import Board, SharedMemory
from bitproof.harness.within_user_code import refusals_raised

if TYPE_CHECKING:
    from torch.distributed import Store

# After a rank's first failure, the time for other ranks to report an earlier one; longer if all failures so far are
# only lost connections.
GRACE_SECONDS = 0.5
SECONDARY_GRACE_SECONDS = 3.0
POLL_SECONDS = 0.2
_NUM_STACKS = 4
_LOOPBACK = "127.0.0.1"


@dataclass
class Rank:
    """A forked rank as its parent sees it: its process, log, progress and, once it has ended, its report or failure."""

    rank: int
    process: Child
    log: Path
    place: str = "at its start"
    step: int = -1
    graph: PreparedGraph | None = None
    done: Done | None = None
    exited: bool = False
    failure: Failure | None = None


@dataclass
class Ranks:
    """The ranks of a run that this process forks and watches."""

    job: Job
    log_of: Callable[[int], Path]
    on_event: OnEvent
    ranks: list[Rank] = field(default_factory=list)
    ready: int = 0
    start_seconds: float = 0.0
    memory: SharedMemory | None = None
    board: Board | None = None
    master_port: socket.socket | None = None

    def run(self, hangup: int | None = None) -> End:
        """Fork the ranks, watch them until all have ended, and return how the run ended. Never leaves a rank alive.

        Raises SystemExit if the file descriptor `hangup` hangs up: the requester has stopped waiting.
        """
        # Other children of this process, such as stages, must survive the run.
        began, others = time.monotonic(), children()
        if self.job.rank_slots.server is None:  # a FileStore waits forever if its folder is missing
            Path(self.job.rank_slots.store).parent.mkdir(parents=True, exist_ok=True)
            self.master_port = reserved_port()
        self.log_of(0).parent.mkdir(parents=True, exist_ok=True)
        if self.job.watched:
            import bitproof.harness.localize.logs.call_log  # noqa: F401 - once, and not by each rank
        if self.job.run.placement.in_memory:
            self.memory = SharedMemory(self.job.run.case.parallelism.world_size)
        self.board = Board(self.job.run.case.parallelism.world_size)
        try:
            for rank in self.job.rank_slots.ranks:
                self.ranks.append(self._fork(rank))
            return self._watch(began, hangup)
        finally:
            # Kill all before waiting for any, so that they end at the same time.
            processes = [rank.process for rank in self.ranks]
            for process in processes:
                process.kill_without_waiting()
            for process in processes:
                process.kill()
            end_children(but=others)  # processes that a system started and did not reap
            if self.master_port is not None:
                self.master_port.close()
            if self.memory is not None:
                self.memory.close()
            self.board.close()

    def _fork(self, rank: int) -> Rank:
        def live(send: Send) -> int:
            port = 0 if self.master_port is None else self.master_port.getsockname()[1]
            os.environ.update(environment_of(rank, self.job.run.case.parallelism.world_size, self.job.rank_slots, port))
            if self.job.rank_slots.server is None:  # torchrun's ranks get their cores from torchrun
                keep_to_one_core(rank, self.job.run.case.parallelism.world_size)
            return _run_reporting(self.job, rank, send, self.memory, self.board)

        log = self.log_of(rank)
        return Rank(rank, fork(live, log=log), log)

    def _watch(self, began: float, hangup: int | None) -> End:
        # A run ends in one of three ways: all ranks have exited, a rank has failed and the others had time to report
        # their own failures, or the deadline has passed.
        deadline = began + self.job.run.timeout
        rank_of = {rank.process: rank for rank in self.ranks}
        with Watch([*rank_of], hangup) as watch:
            while not all(rank.exited for rank in self.ranks):
                for process, line in watch.look(POLL_SECONDS):
                    self._read_message(rank_of[process], line, began)
                # All ranks have saved: kill them at once, so that no rank gets further than the others.
                if self.job.is_killed and all(rank.done for rank in self.ranks):
                    for process in rank_of:
                        process.kill_without_waiting()
                self._note_exits()
                limit = self._grace_deadline()
                # After a failure the grace period counts, and no longer the deadline: its cause is worth waiting for.
                if limit is not None and time.monotonic() >= limit:
                    break
                if limit is None and time.monotonic() >= deadline:
                    return self._report_hang()
        if failures := self._failures():
            failure = blame(failures)
            rank = next(rank for rank in self.ranks if rank.rank == failure.rank)
            return End(failure=failure, place=rank.place, log=log_name(rank.log))
        done = [rank.done for rank in self.ranks if rank.done is not None]
        return End(done=done, graph=self.ranks[0].graph, start_seconds=self.start_seconds)

    def _read_message(self, rank: Rank, line: bytes, began: float) -> None:
        try:
            account = framing.read(line, *STATUS_MESSAGES)
        except ValueError as error:  # a system may write into any descriptor, so a bad message fails its own rank
            rank.failure = rank.failure or failure_of_unknown_message(rank.rank, error)
        else:
            self._handle(rank, account, began)

    def _handle(self, rank: Rank, account: Account, began: float) -> None:
        match account:
            case Prepared(graph=graph):
                rank.graph = graph
                self._check_one_graph(rank)
            case Ready():
                self.ready += 1
                self.start_seconds = time.monotonic() - began
            case StepBegan(step=step):
                rank.step, rank.place = step, f"at step {step}"
                # All ranks take the same steps, so the progress of one is enough.
                if rank.rank == 0:
                    self.on_event(Event(event="step", step=step, steps=self.job.steps))
            case StepsEnded():
                rank.place = "at the end"
            case Done():
                rank.done = account
            case Failure():
                # The first report counts: a later failure may be its consequence.
                rank.failure = rank.failure or account

    def _check_one_graph(self, rank: Rank) -> None:
        # Such ranks would compute other values or deadlock.
        # Each rank is compared as soon as its graph is known, so a differing rank fails before the others wait for it.
        hashes = {r.rank: r.graph.code_hash for r in self.ranks if r.graph is not None}
        first = next(iter(hashes), rank.rank)
        if rank.rank in hashes and hashes[rank.rank] != hashes[first]:
            rank.failure = Failure(
                rank=rank.rank,
                time=time.monotonic(),
                what=f"prepared another graph than rank {first}",
                found=f"code hash {hashes[rank.rank]}, not {hashes[first]}",
            )

    def _note_exits(self) -> None:
        for rank in self.ranks:
            status = rank.process.status  # its process was reaped, so it has sent everything
            if rank.exited or status is None:
                continue
            rank.exited = True
            is_expected = status == (-signal.SIGKILL if self.job.is_killed else 0)
            if rank.failure is None and (not is_expected or rank.done is None):
                rank.failure = failure_of_exit(rank.rank, status, rank.log)

    def _failures(self) -> list[Failure]:
        return [rank.failure for rank in self.ranks if rank.failure is not None]

    def _grace_deadline(self) -> float | None:
        failures = self._failures()
        if not failures:
            return None
        # Ranks that only lost their peers are first to fail if the culprit takes long to report, so wait longer for it.
        grace = SECONDARY_GRACE_SECONDS if all(failure.secondary for failure in failures) else GRACE_SECONDS
        return min(failure.time for failure in failures) + grace

    def _report_hang(self) -> End:
        unfinished = [rank for rank in self.ranks if rank.place != "at the end" and not rank.exited]
        # If all ranks have taken their steps, those that have not exited are stuck in writing or in leaving groups.
        unfinished = unfinished or [rank for rank in self.ranks if not rank.exited]
        # All late ranks write their stacks into their logs. The error shows those of the ranks at the earliest step:
        # the others probably wait for these.
        ask_for_stacks([rank.process.pid for rank in unfinished])
        last = min(rank.step for rank in unfinished)
        lagging = [rank for rank in unfinished if rank.step == last]
        stacks = [
            f"rank {rank.rank}, {log_name(rank.log)}:\n"
            f"{self._collective_of(rank)}{stack_of(rank.log, _run_reporting.__name__)}"
            for rank in lagging[:_NUM_STACKS]
        ]
        if left := lagging[_NUM_STACKS:]:
            lines = [f"rank {rank.rank}:\n{self._collective_of(rank)}".rstrip() for rank in left]
            stacks.append("\n".join([f"and {len(left)} more ranks, in their logs", *lines]))
        return End(unfinished={rank.rank: rank.place for rank in unfinished}, stacks="\n\n".join(stacks))

    def _collective_of(self, rank: Rank) -> str:
        assert self.board is not None, "it was made before ranks were forked"
        last = self.board.read(rank.rank)
        return f"  {last}\n" if last else ""


def environment_of(rank: int, world_size: int, rank_slots: RankSlots, port: int) -> dict[str, str]:
    """Return the environment variables of a rank: those that torchrun sets, and a variable that marks a rank of
    bitproof.

    `port`, which must be reserved, becomes MASTER_PORT, unless a launcher with a port of its own started the rank.
    """
    variables = {
        FORKED: str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank if rank_slots.local_rank is None else rank_slots.local_rank),
    }
    if rank_slots.server is None:
        one_machine = {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port)}
        # No agent serves a store here, so a trainer's own TCPStore must be a server on rank 0.
        return variables | one_machine | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    # Under a launcher, code that counts ranks per machine must see the launcher's numbers.
    host, number = rank_slots.server
    many = str(world_size if rank_slots.local_world_size is None else rank_slots.local_world_size)
    return variables | {"LOCAL_WORLD_SIZE": many, "MASTER_ADDR": host, "MASTER_PORT": str(number)}


def reserved_port() -> socket.socket:
    """Reserve a port of the loopback interface, and return the socket that reserves it until it is closed.

    Linux assigns the port to no other socket. A store can still listen at it, with SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((_LOOPBACK, 0))
    return reserved


def _run_reporting(
    job: Job,
    rank: int,
    send: Callable[[Account | Failure], None],
    memory: SharedMemory | None,
    board: Board | None,
) -> int:
    turn, reported = threading.Lock(), list[BaseException]()

    def send_in_turn(account: Account | Failure) -> None:
        with turn:  # a refusal may come from any thread
            send(account)

    def fail(error: BaseException, around: Sequence[FrameSummary] = ()) -> None:
        # A refusal, which is an error that bitproof raises within user code, is reported when it is raised: user code
        # might catch it. Otherwise it arrives again as the exception that ends the rank.
        if any(error is each for each in reported):
            return
        reported.append(error)
        failure = failure_of_exception(rank, error, around)
        print(failure.details, file=sys.stderr, flush=True)
        send_in_turn(failure)

    try:
        with profiled(job.profile_of(rank)), refusals_raised(lambda error: fail(error, _frames_around(error))):
            run_rank(job, rank, open_store(job), send_in_turn, memory, board)
    except BaseException as error:
        fail(error)
        return 1
    return 0


def _frames_around(refusal: BaseException) -> list[FrameSummary]:
    frames = extract_stack()
    names, own = [frame.name for frame in frames], within_user_code.__file__
    # In another thread that function is missing, and all frames count.
    first = names.index(_run_reporting.__name__) + 1 if _run_reporting.__name__ in names else 0
    # The newest frames are those of reporting. Below them are the frames of `within_user_code` itself, then the code
    # that raised the refusal.
    last = max(index for index, frame in enumerate(frames) if frame.filename == own)
    while frames[last].filename == own:
        last -= 1
    # An error that was raised already has that code's frame in its traceback.
    return frames[first : last + (refusal.__traceback__ is None)]


def open_store(job: Job) -> Store:
    from torch.distributed import FileStore, PrefixStore, TCPStore

    slots = job.rank_slots
    if slots.server is None:
        return FileStore(slots.store, job.run.case.parallelism.world_size)
    host, port = slots.server
    patience = timedelta(seconds=job.collective_timeout)
    return PrefixStore(slots.store, TCPStore(host, port, is_master=False, timeout=patience))
