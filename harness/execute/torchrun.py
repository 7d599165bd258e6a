"""Run cases on the ranks that torchrun made, instead of starting any: how a run outgrows one machine.

Rank 0 leads: it runs the very code that runs elsewhere, but its requests go to all ranks, through torchrun's
store. The others follow until they are told that all is done. What torchrun started only talks and
carries: each has a host of its own, as a session has, which forks its one rank of a run and watches it.
Recordings travel to rank 0 as the bytes of their files; what arrives is checked like any file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from harness.case import Case
from harness.errors import BitproofError, CaseError, RankError
from harness.execute import wire
from harness.execute.accounts import End
from harness.execute.failures import Failure, Problem, blame, error_of_hang
from harness.execute.host_process import Abandoned, HostLost, HostProcess
from harness.execute.requests import (
    ARCHIVE,
    VALUES,
    MachineRequest,
    Request,
    RunAnswer,
    RunRequest,
    SeatedRunRequest,
    Seats,
)
from harness.machine.determinism import ENVIRONMENT
from harness.machine.devices import Placement, place
from harness.options import OnEvent
from harness.program.own_packages import search_path
from harness.records import CaseResult

if TYPE_CHECKING:
    from torch.distributed import Store

    from harness.options import RunOptions

# After a case's time is up, how long a host may take to say how its rank failed, and rank 0 waits for the others.
_HOST_MARGIN = 15.0
_MARGIN = 30.0
# After a rank failed, how long another one may take to notice. On NCCL it never may: its host waits for the device.
_PEER_SECONDS = 5.0
_START_SECONDS = 300.0
# What a rank leaves: its part of a recording, or of a replay, and what may lie beside it.
_FILES = ("", VALUES, ARCHIVE)
# Followers outwait rank 0, which may still compare when they are done.
_PATIENCE = timedelta(hours=1)

A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class Farewell:
    """Rank 0 asks for nothing more; `problem` is what ended it, None where it came to its end."""

    problem: Problem | None = None


Message = RunRequest | CaseResult | Farewell
"""What rank 0 tells all others."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """How a run ended on one of torchrun's ranks: its end, or the problem for which it has none.

    `clock` is what its machine's monotonic clock lacks to the time of day, on which machines agree. The bytes that it
    sends along are those of its `_FILES`, of so many each.
    """

    clock: float
    end: End | None = None
    problem: Problem | None = None
    num_bytes: tuple[int, ...] = ()


def check_world_size(cases: Sequence[Case]) -> None:
    """Raise CaseError when a case has another world size than torchrun."""
    world_size = int(os.environ["WORLD_SIZE"])
    for case in cases:
        if case.parallelism.world_size != world_size:
            raise CaseError(
                f"case {case.name} does not fit the ranks that torchrun started",
                expected=f"{case.parallelism.world_size} ranks",
                found=f"WORLD_SIZE={world_size}",
                fix=f"start {case.parallelism.world_size} ranks, or give --world-size {world_size}",
            )


@contextmanager
def open_team(run_dir: Path, options: RunOptions) -> Iterator[Team]:
    """Rank 0's desk, at which all ranks answer. They are told when the block ends, and of an error that ends it."""
    with _joined(run_dir, options) as team:
        problem = None
        try:
            yield team
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = Problem.of(error, "rank 0")
            raise
        finally:
            team.tell_all(Farewell(problem=problem))


def follow_rank_0(run_dir: Path, options: RunOptions) -> Iterator[CaseResult]:
    """Any other rank's part: do what rank 0 asks until it is done. Yields its results, raises what ended it."""
    with _joined(run_dir, options) as team:
        while True:
            match team.hear():
                case RunRequest() as request:
                    team.run(request)
                case CaseResult() as result:
                    yield result
                case Farewell(problem=problem):
                    if problem is not None:
                        raise problem.error()
                    return


@contextmanager
def _joined(run_dir: Path, options: RunOptions) -> Iterator[Team]:
    os.environ.update(ENVIRONMENT)  # as the hosts have it: a manifest tells it
    sys.path[:] = search_path()
    from torch.distributed.rendezvous import rendezvous

    with tempfile.TemporaryDirectory(prefix="bitproof-", ignore_cleanup_errors=True) as work:
        team = Team(Path(run_dir), options, Path(work), int(os.environ["RANK"]))
        try:
            team.store, _, _ = next(iter(rendezvous("env://")))
            yield team
        finally:
            team.close()


class Team:
    """One rank among torchrun's. Rank 0's is the desk at which its cases ask, as a session's is elsewhere."""

    store: Store

    def __init__(self, run_dir: Path, options: RunOptions, work: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.options = options
        self.work = work
        self._rank = rank
        self._local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._num_messages = 0
        self._lost: BitproofError | None = None
        self._num_gpus: int | None = None
        self._host = self._start_host()

    def close(self) -> None:
        """End the host, and all that it started."""
        self._host.kill()

    def place(self, case: Case) -> Placement:
        """Where this machine's ranks run. Raises CaseError when it asks for GPUs that are not there."""
        if self._num_gpus is None and self.options.device != "cpu":
            with suppress(RankError):  # a host that cannot start says so again, as each case's result
                self._num_gpus = self._ask_host(MachineRequest(), _START_SECONDS).gpus
        if self.options.collectives == "shared":
            raise CaseError(
                "the ranks that torchrun made do not share memory, and may be on several machines",
                expected="collectives over gloo or NCCL",
                found="--collectives shared",
                fix="leave --collectives out, or run without torchrun",
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", case.parallelism.world_size))
        asked = None if self.options.collectives == "auto" else self.options.collectives
        return place(self.options.device, local, self._num_gpus or 0, asked, share_gpus=self.options.share_gpus)

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """Rank 0: have all ranks run a system, or its own host do what takes no ranks. Raises what went wrong."""
        if isinstance(request, RunRequest):
            return cast(A, self._run_all(request, on_event))
        return self._ask_host(request, timeout, on_event)

    def announce(self, result: CaseResult) -> None:
        """Rank 0: tell all ranks what a case came to."""
        self.tell_all(result)

    def tell_all(self, message: Message) -> None:
        """Rank 0: what the others hear next."""
        self._num_messages += 1
        self.store.set(self._key("message"), wire.write(message).decode())

    def hear(self) -> Message:
        """Any other rank: what rank 0 tells next."""
        self._num_messages += 1
        self.store.wait([self._key("message")], _PATIENCE)
        message: Message = wire.read(self.store.get(self._key("message")), RunRequest, CaseResult, Farewell)
        return message

    def run(self, request: RunRequest) -> None:
        """Any other rank: its part of a run, and how it ended, for rank 0."""
        account, content = self._run(request)
        self.store.set(self._key(f"from{self._rank}"), wire.write(account) + content)  # type: ignore[arg-type]

    def _run_all(self, request: RunRequest, on_event: OnEvent) -> RunAnswer:
        from harness.execute.answers import finish_run

        if self._lost is not None:
            raise self._lost
        self.tell_all(request)
        answers = self._gather(self._run(request, on_event), request)
        parts = [self.work / f"part{rank}" for rank in range(len(answers))]
        for part, (account, content) in zip(parts, answers, strict=True):
            file_contents = BytesIO(content)
            for suffix, size in zip(_FILES, account.num_bytes, strict=True):
                part.with_suffix(suffix).write_bytes(file_contents.read(size))
        return finish_run(request, [account.end for account, _ in answers if account.end is not None], parts)

    def _run(self, request: RunRequest, on_event: OnEvent = lambda event: None) -> tuple[Account, bytes]:
        """This rank's run: its account, and its files' bytes. Never raises: an error is an account too."""
        files = [(self.work / "part").with_suffix(suffix) for suffix in _FILES]
        for file in files:
            file.unlink(missing_ok=True)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        seats = Seats(
            ranks=(self._rank,),
            part=str(files[0]),
            store=f"{attempt}/{self._key('groups')}",
            server=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            local_rank=self._local_rank,
        )
        account = Account(clock=time.time() - time.monotonic())
        try:
            seated = SeatedRunRequest(run=request, seats=seats)
            end = self._host.ask(seated, request.timeout + _HOST_MARGIN, on_event, self._peer_watch())
        except Abandoned:
            self._host = self._start_host()
            end = End(failure=_ended_for_a_peer(self._rank), place="while it waited for other ranks")
        except Exception as error:
            self._tell_failed()
            if isinstance(error, HostLost):
                self._host, error = self._start_host(), error.error
            return replace(account, problem=Problem.of(error, request.system)), b""
        if not end.done:
            self._tell_failed()
        contents = [file.read_bytes() if file.exists() else b"" for file in files]
        return replace(account, end=end, num_bytes=tuple(map(len, contents))), b"".join(contents)

    def _tell_failed(self) -> None:
        """Let the other ranks know that this one's run has failed: they may wait for it where no error reaches them."""
        self.store.set(self._key("failed"), "")

    def _peer_watch(self) -> Callable[[], bool]:
        """Whether another rank failed long enough ago for this one to have told its own end, had it come to any."""
        key, seen = self._key("failed"), float("inf")

        def is_abandoned() -> bool:
            nonlocal seen
            if seen == float("inf") and self.store.check([key]):
                seen = time.monotonic()
            return time.monotonic() - seen > _PEER_SECONDS

        return is_abandoned

    def _ask_host(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """This rank's own host answers; one that was lost is replaced."""
        try:
            return self._host.ask(request, timeout, on_event)
        except HostLost as lost:
            self._host = self._start_host()
            raise lost.error from lost

    def _start_host(self) -> HostProcess:
        log = self.run_dir / "logs" / ("host.log" if self._rank == 0 else f"host{self._rank}.log")
        return HostProcess(log, temporary=self.work, verbose=self.options.verbose, is_alone=False)

    def _gather(self, own: tuple[Account, bytes], run: RunRequest) -> list[tuple[Account, bytes]]:
        """Every rank's account, each with a good end, and its files' bytes, in rank order.

        Raises the error of the rank to blame, and RankError when a rank says nothing in time.
        """
        answers, silent = [own], []
        is_bad = own[0].end is None or not own[0].end.done
        limit = time.monotonic() + (_MARGIN if is_bad else run.timeout + _MARGIN)
        for rank in range(1, run.case.parallelism.world_size):
            key = self._key(f"from{rank}")
            try:
                self.store.wait([key], timedelta(seconds=max(0.1, limit - time.monotonic())))
                answers.append(_unpack(self.store.get(key)))
                self.store.delete_key(key)
            except RuntimeError:  # torch's stores time out with subclasses of it
                silent.append(rank)
        accounts = [account for account, _ in answers]
        problem = next((account.problem for account in accounts if account.problem), None)
        error = problem.error() if problem else _error_of(accounts, run, silent)
        if error is not None:
            self._lost = error if silent else None
            raise error
        return answers

    def _key(self, name: str) -> str:
        return f"bitproof/{self._num_messages}/{name}"


def _ended_for_a_peer(rank: int) -> Failure:
    what = "was ended, as it still waited for a rank that had failed"
    return Failure(rank=rank, time=time.monotonic(), what=what, secondary=True)


def _error_of(accounts: list[Account], run: RunRequest, silent: list[int]) -> RankError | None:
    """What to tell of ranks that failed, or that were late, or that said nothing at all; None when all ended well."""
    ends = [account.end for account in accounts if account.end is not None]
    by_failure = {
        replace(account.end.failure, time=account.end.failure.time + account.clock): account.end
        for account in accounts
        if account.end is not None and account.end.failure is not None
    }
    first = blame(by_failure) if by_failure else None
    late = [end for end in ends if end.unfinished]
    if first is not None and (not first.secondary or not (late or silent)):
        return by_failure[first].error(run.system, run.case_timeout)
    if late or silent:
        places = {rank: place for end in late for rank, place in end.unfinished.items()}
        stacks = "\n\n".join(end.stacks for end in late)
        return error_of_hang(run.system, run.case_timeout, places | dict.fromkeys(silent, "silent"), stacks)
    return None


def _unpack(packed: bytes) -> tuple[Account, bytes]:
    line, _, content = packed.partition(b"\n")
    return wire.read(line, Account), content
