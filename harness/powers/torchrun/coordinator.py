"""A rank of torchrun: it connects to the other ranks, and runs its part of every run.

Rank 0 also runs the cases: it sends each run to all ranks, and collects how their parts ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError, CaseError, RankError
from bitproof.harness.execute.failures import Failure, Problem, blame, error_of_hang
from bitproof.harness.execute.host_process import Abandoned, HostLost, HostProcess
from bitproof.harness.execute.requests import (
    FingerprintRequest,
    LocalRunRequest,
    RankFingerprint,
    RankSlots,
    Request,
    RunAnswer,
    RunRequest,
)
from bitproof.harness.execute.status_messages import End
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import ROLES, OnEvent
from bitproof.harness.powers.torchrun.messages import FILES, Farewell, Hello, Message, RunReport, unpack
from bitproof.harness.powers.torchrun.peers import Peers
from bitproof.harness.powers.torchrun.rendezvous import Rendezvous
from bitproof.harness.powers.torchrun.seats import Seat, own_local_rank, own_machine, place_seats
from bitproof.harness.records import CaseResult
from bitproof.harness.runtime import interrupts
from bitproof.harness.runtime.launched import do_not_wait_for_rank_0, reports_for_its_machine
from bitproof.harness.runtime.search_path import search_path
from bitproof.harness.runtime.work_folder import make_work_folder, remove_work_folder

if TYPE_CHECKING:
    from bitproof.harness.options import RunOptions

# After a case's time is up: how long a host may take to report its rank's failure, and how long rank 0 waits.
_HOST_MARGIN = 15.0
_MARGIN = 30.0
_START_SECONDS = 300.0
_LAST_WORDS = 10.0

A = TypeVar("A")


def check_world_size(cases: Sequence[Case]) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    for case in cases:
        if {case.of(role).parallelism.world_size for role in ROLES} != {world_size}:
            raise CaseError(
                f"case {case.name} does not fit the ranks that torchrun started",
                expected=f"{case.parallelism.world_size} ranks",
                found=f"WORLD_SIZE={world_size}",
                fix=f"start {case.parallelism.world_size} ranks, or give --world-size {world_size}",
            )


@contextmanager
def open_coordinator(run_dir: Path, options: RunOptions) -> Iterator[Coordinator]:
    """Context for rank 0: yields the coordinator, once all ranks are connected.

    At the end of the block, a message ends the other ranks. If an error ended the block, the message has this error.
    """
    with _connected(run_dir, options) as coordinator:
        problem = None
        try:
            yield coordinator
        # The caller has closed the iterator of results early: that is no error.
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = Problem.of(error, "rank 0")
            raise
        finally:
            coordinator.peers.send_to_all(Farewell(problem=problem))


def follow_rank_0(run_dir: Path, options: RunOptions) -> Iterator[CaseResult]:
    """Run this rank's part of each run, until rank 0 ends. Only on ranks other than 0.

    Yields the results that rank 0 sends, and raises the error that ended rank 0.
    """
    with _connected(run_dir, options) as coordinator:
        while True:
            match coordinator.hear():
                case RunRequest() as request:
                    coordinator.run(request)
                case CaseResult() as result:
                    yield result
                case Farewell(problem=problem):
                    coordinator.peers.has_outcome = True
                    if problem is not None:
                        raise problem.error()
                    return


@contextmanager
def _connected(run_dir: Path, options: RunOptions) -> Iterator[Coordinator]:
    os.environ.update(ENVIRONMENT)  # as on the hosts, since manifests contain it
    sys.path[:] = search_path()
    with _work_folder() as work:
        coordinator = Coordinator(Path(run_dir), options, work, int(os.environ["RANK"]))
        problem = None
        try:
            coordinator.join()
            # Code reads it to decide which rank reports for a machine.
            os.environ.update(LOCAL_RANK=str(coordinator.seat.local_rank))
            yield coordinator
        except GeneratorExit:
            raise
        except BaseException as caught:
            error = coordinator.peers.explained(caught)
            problem = Problem.of(error, f"rank {coordinator.rank}")
            if coordinator.rank and not coordinator.peers.has_outcome:
                # Otherwise rank 0 prints the error; without it, the first rank of each machine does.
                do_not_wait_for_rank_0()  # rank 0 is gone, or this rank was interrupted
                if reports_for_its_machine() and isinstance(error, BitproofError):
                    print(error, file=sys.stderr, flush=True)
            if error is not caught:
                raise error from caught
            raise
        finally:
            with interrupts.held():
                # A second signal must not cut off the message to rank 0 with the reason why this rank leaves.
                coordinator.close(problem)


@contextmanager
def _work_folder() -> Iterator[Path]:
    work = make_work_folder()
    try:
        yield work
    finally:
        remove_work_folder(work)


class Coordinator:
    """A rank of torchrun. On rank 0, it is also the client through which cases are run (`session.Client`)."""

    def __init__(self, run_dir: Path, options: RunOptions, work: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.options = options
        self.work = work
        self.rank = rank
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.seat = Seat(local_rank=rank, local_world_size=self.world_size)
        """This rank's number on its machine, and its GPU; final once all ranks have connected."""
        self._seats = [self.seat]
        self._reported_problem: str | None = None
        self.peers = Peers(rank, self.world_size, work)
        self._own_dir = self._first_dir = run_dir.resolve()
        # Started at once, so that the host loads torch while ranks still connect.
        self._host = self._start_host()

    def close(self, problem: Problem | None = None) -> None:
        """End the host process, which has loaded torch, and its descendants, and close the connections to other ranks.

        A rank other than 0 first sends `problem` to rank 0, as its reason for leaving.
        """
        # Rank 0's last message has the error for all ranks, and another rank's has its reason: these get more time.
        self._host.kill()
        if self.rank and (line := self.peers.connections.get(0)) is not None:
            self.peers.links.send(line, Farewell(problem=problem))
        self.peers.close(_LAST_WORDS if self.rank == 0 or problem is not None else 1.0)

    def join(self) -> None:
        """Connect with all other ranks, within the time limit of a case.

        Raises RankError, which names ranks that did not connect, or CaseError if ranks have other versions or code.
        """
        rendezvous = Rendezvous(self.peers, self.options.timeout, self._ask_facts)
        hello = Hello(
            token="",
            rank=self.rank,
            world_size=self.world_size,
            node=_node(),
            machine=own_machine(),
            local_rank=own_local_rank(os.environ),
            run_dir=str(self._own_dir),
        )
        self._rendezvous = rendezvous  # it may serve the store
        try:
            if self.rank:
                welcome = rendezvous.connect_to_rank_0(hello)
                self._first_dir, self._own_dir, self.seat = welcome.run_dir, welcome.own_dir, welcome.seat
            else:
                self._seats = rendezvous.wait_for_ranks(hello)
                self.seat = self._seats[0]
        except BaseException as error:
            # torchrun ends the others with a signal when one rank dies: report the death, and not the signal.
            named = self.peers.launcher.error_of_dead_siblings() if isinstance(error, interrupts.STOPS) else None
            if self.rank == 0:
                self.peers.send_to_all(Farewell(problem=Problem.of(named or error, "rank 0")))
            elif named is not None:
                with interrupts.held():
                    rendezvous.connect_before_exit(hello)
            if named is not None:
                raise named from error
            raise

    def place(self, case: Case) -> Placement:
        """Return the device and the backend on which all ranks run a case.

        Raises CaseError if there are too few GPUs, if collectives in shared memory are requested, or if a case that
        resumes from a checkpoint would run on several machines.
        """
        # `machine` and not `node`: several agents of torchrun may be on one machine.
        machines = len({seat.machine for seat in self._seats})
        if case.resume_at is not None and machines > 1:
            raise CaseError(
                f"case {case.name} has its candidate load what it saved, which other machines may not see",
                expected="all ranks on one machine",
                found=f"{len(self._seats)} ranks on {machines} machines",
                fix="run it on one machine",
            )
        if self.options.collectives == "shared":
            raise CaseError(
                "the ranks that torchrun made do not share memory, and may be on several machines",
                expected="collectives over gloo or NCCL",
                found="--collectives shared",
                fix="leave --collectives out, or run without torchrun",
            )
        asked = None if self.options.collectives == "auto" else self.options.collectives
        placement, why = place_seats(self.options.device, self._seats, asked, share_gpus=self.options.share_gpus)
        if why is not None and why != self._reported_problem:
            print(f"bitproof: no GPU is used: {why}", file=sys.stderr, flush=True)
            self._reported_problem = why
        return placement

    def ask(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """Answer a request: run a system on all ranks, or let rank 0's host process answer. Only on rank 0.

        Raises the error of the run or of the host process.
        """
        if isinstance(request, RunRequest):
            return cast(A, self._run_all(request, on_event))
        return self._ask_host(request, timeout, on_event)

    def announce(self, result: CaseResult) -> None:
        self.peers.send_to_all(result)

    def hear(self) -> Message:
        """Return the next message from rank 0, waiting for it. Only on other ranks. Raises RankError if rank 0 is
        gone.
        """
        while True:
            self.peers.listen()
            if self.peers.heard:
                return self.peers.heard.pop(0)
            self.peers.refuse_lost("while it waited for what to do")
            self.peers.links.wait(0.2)

    def run(self, request: RunRequest) -> None:
        """Run this rank's part of a run, and report to rank 0 how the part ended, with its files. Only on other
        ranks.
        """
        localized = self._localized(request)
        account, files = self._run(localized)
        if localized is not request:  # rank 0 removes its own machine's
            shutil.rmtree(localized.work, ignore_errors=True)
        self.peers.links.send(self.peers.connections[0], account, files)

    def _run_all(self, request: RunRequest, on_event: OnEvent) -> RunAnswer:
        from bitproof.harness.execute.host.answerer import finish_run

        try:
            # A run that is resumed has two halves, any other a single one.
            *before, (ends, parts) = [self._run_half(half, at, on_event) for at, half in enumerate(request.halves)]
            return finish_run(request, ends, parts, [part for _, earlier in before for part in earlier])
        finally:
            shutil.rmtree(request.work, ignore_errors=True)

    def _run_half(self, request: RunRequest, number: int, on_event: OnEvent) -> tuple[list[End], list[Path]]:
        """Run a system on all ranks: the whole run, or half `number` (0 or 1) of a run that resumes from a checkpoint.

        Returns a pair: each rank's End, and the path of each rank's file. Raises the error of the rank that failed
        first.
        """
        # An earlier run has lost a rank, so no later one can succeed.
        if self.peers.lost is not None:
            raise self.peers.lost
        self.peers.listen()
        self.peers.refuse_lost(f"before {request.system} ran")
        # Accounts of a failed run must not count for this one.
        self.peers.accounts.clear()
        self.peers.send_to_all(request)
        answers = self._gather(self._run(request, on_event), request)
        parts = [self.work / f"part{number}_{rank}" for rank in range(len(answers))]
        for suffix in FILES:
            own = (self.work / "part").with_suffix(suffix)
            parts[0].with_suffix(suffix).unlink(missing_ok=True)  # an earlier run's
            if own.exists():
                own.replace(parts[0].with_suffix(suffix))
        for part, (account, content) in zip(parts[1:], answers[1:], strict=True):
            unpack(account, content, part)
        return [account.end for account, _ in answers if account.end is not None], parts

    def _run(self, request: RunRequest, on_event: OnEvent = lambda event: None) -> tuple[RunReport, list[Path]]:
        """Run this rank's part of a run. Returns a pair: the report of how the part ended, and the rank's files.

        An error is a field of this report. Ranks other than 0 raise RankError if rank 0 or torchrun is gone.
        """
        number = self.peers.begin_run()
        files = [(self.work / "part").with_suffix(suffix) for suffix in FILES]
        for file in files:
            file.unlink(missing_ok=True)
        rank_slots = RankSlots(
            ranks=(self.rank,),
            part=str(files[0]),
            # A prefix per run: keys of a failed run must not be read by the next.
            store=f"bitproof/{self.peers.token}/{number}",
            server=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            local_rank=self.seat.local_rank,
            local_world_size=self.seat.local_world_size,
            gpu=self.seat.gpu,
        )
        # Monotonic clocks of machines differ; this offset makes failure times comparable.
        account = RunReport(run=number, clock=time.time() - time.monotonic())
        try:
            local_run = LocalRunRequest(run=request, rank_slots=rank_slots)
            end = self._host.ask(local_run, request.timeout + _HOST_MARGIN, on_event, self.peers.is_abandoned)
        # The host was killed together with its rank, because another rank failed or is gone. The next run needs a host.
        except Abandoned:
            if self.rank:
                self.peers.refuse_lost()
            self._host = self._start_host()
            if (ended := self.peers.launcher.ended()) is not None:
                return replace(account, problem=Problem.of(ended, request.system)), []
            # A secondary failure: rank 0 blames the rank that failed first.
            end = End(failure=_ended_for_a_peer(self.rank), place="while it waited for other ranks")
        except Exception as error:
            self.peers.report_failure()
            # The host itself has died, and the next run needs another one.
            if isinstance(error, HostLost):
                self._host, error = self._start_host(), error.error
            return replace(account, problem=Problem.of(error, request.system)), []
        if not end.done:
            self.peers.report_failure()
        if end.log and self._own_dir != self._first_dir:
            # Rank 0 prints the path, which is on this machine.
            end = replace(end, log=f"{socket.gethostname()}:{self._own_dir / end.log}")
        present = [file for file in files if file.exists()]
        sizes = tuple(file.stat().st_size if file.exists() else 0 for file in files)
        return replace(account, end=end, num_bytes=sizes), present

    def _localized(self, request: RunRequest) -> RunRequest:
        """Return rank 0's request for a run, with paths that are valid on this machine.

        Profiles are written only on rank 0's machine.
        """
        # Paths of rank 0 are valid here.
        if self._own_dir == self._first_dir:
            return request
        logs = self._own_dir / "logs"
        if request.logs.is_relative_to(self._first_dir):
            logs = self._own_dir / request.logs.relative_to(self._first_dir)
        return replace(
            request,
            logs=logs,
            work=self.work / "run",
            # The times of a profile would need rank 0's clock.
            profile=None,
            options=replace(
                request.options, kept_graphs=self.options.kept_graphs if request.options.kept_graphs else None
            ),
            later=self._localized(request.later) if request.later else None,
        )

    def _ask_host(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        try:
            return self._host.ask(request, timeout, on_event)
        except HostLost as lost:
            self._host = self._start_host()
            raise lost.error from lost

    def _ask_facts(self, is_gone: Callable[[], bool]) -> RankFingerprint | None:
        request = FingerprintRequest(names_gpus=self.options.device != "cpu")
        try:
            return self._host.ask(request, _START_SECONDS, lambda event: None, is_gone)
        except Abandoned:
            self._host = self._start_host()
            return None
        except HostLost as lost:
            self._host = self._start_host()
            raise lost.error from lost

    def _start_host(self) -> HostProcess:
        log = self._own_dir / "logs" / ("host.log" if self.rank == 0 else f"host{self.rank}.log")
        starts = f"rank {self.rank} on {socket.gethostname()}"
        return HostProcess(log, temporary=self.work, verbose=self.options.verbose, starts=starts)

    def _gather(self, own: tuple[RunReport, list[Path]], run: RunRequest) -> list[tuple[RunReport, Path | None]]:
        """Wait until each rank has reported the end of its part. `own` is rank 0's own report, with its files.

        Returns, in rank order, each rank's report paired with the file of its attached bytes. Raises the error of the
        rank that failed first.
        """
        # After a failure here the others end soon, so they get the margin but not a whole run's time.
        is_bad = own[0].end is None or not own[0].end.done
        limit = time.monotonic() + (_MARGIN if is_bad else run.timeout + _MARGIN)
        waited_for = set(range(1, self.world_size))
        while True:
            self.peers.listen()
            waited_for -= self.peers.accounts.keys()
            if not waited_for:
                break
            self.peers.launcher_must_live()
            if waited_for & self.peers.gone().keys():
                break
            # A rank whose files are arriving is not late: they may be large.
            is_late = time.monotonic() > limit
            if is_late and not any(self.peers.connections[rank].is_within_message for rank in waited_for):
                break
            self.peers.links.wait(0.2)
        # Rank 0's files are on this disk, so no file came with its account.
        answers = [(own[0], None), *(self.peers.accounts[rank] for rank in sorted(self.peers.accounts))]
        accounts = [account for account, _ in answers]
        # If a rank has failed by itself, its failure explains why others are gone.
        if waited_for & self.peers.gone().keys() and not any(account.failed_by_itself for account in accounts):
            self.peers.note_failed()
            self.peers.refuse_lost(f"while {run.system} ran")
        problem = next((account.problem for account in accounts if account.problem), None)
        silent = sorted(waited_for)
        # A problem comes from outside of the run, such as a host that does not start, and so explains all else.
        error = problem.error() if problem else _error_to_report(accounts, run, silent)
        if error is not None:
            self.peers.lost = error if silent else None
            raise error
        return answers


def _node() -> str:
    """Return a name for this machine and torchrun's agent on it, such as `host/0`. All ranks of the agent get the same
    name.
    """
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


def _ended_for_a_peer(rank: int) -> Failure:
    what = "was ended, as it still waited for a rank that had failed"
    return Failure(rank=rank, time=time.monotonic(), what=what, secondary=True)


def _error_to_report(accounts: list[RunReport], run: RunRequest, silent: list[int]) -> RankError | None:
    # Failures have times on the monotonic clocks of their machines. `clock` converts them to the time of day.
    ends = [account.end for account in accounts if account.end is not None]
    by_failure = {
        replace(account.end.failure, time=account.end.failure.time + account.clock): account.end
        for account in accounts
        if account.end is not None and account.end.failure is not None
    }
    first = blame(by_failure) if by_failure else None
    late = [end for end in ends if end.unfinished]
    # A rank that only lost a peer does not explain a hang: then the late and silent ranks are reported.
    if first is not None and (not first.secondary or not (late or silent)):
        return by_failure[first].error(run.system, run.case_timeout)
    if late or silent:
        # The last place of each late rank; a rank that sent nothing at all is silent.
        places = {rank: place for end in late for rank, place in end.unfinished.items()}
        stacks = "\n\n".join(end.stacks for end in late)
        return error_of_hang(run.system, run.case_timeout, places | dict.fromkeys(silent, "silent"), stacks)
    return None
