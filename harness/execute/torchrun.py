"""Run cases on the ranks that torchrun made, instead of starting any: how a run outgrows one machine.

Rank 0 leads: it runs the very code that runs elsewhere, but its requests go to all ranks. The others follow until they
are told that all is done. What torchrun started only talks and carries: each has a host of its own, as a session has,
which forks its one rank of a run and watches it. They talk over connections of their own (`execute/links.py`);
torchrun's store serves to find rank 0, and the forked ranks to find each other. Recordings travel to rank 0 as the
bytes of their files; what arrives is checked like any file.

1. Rank 0 says in the store where it listens, and the others come to it. Who has not come in time is named.
2. Every rank has its host say what it is made of. Ranks that are made of other things than rank 0 are refused.
3. Rank 0 tells what to run, each rank tells how that ended. Who vanishes meanwhile is named within seconds.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bitproof.harness.capture.made_of import Facts, differences, tell_ranks
from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError, CaseError, RankError
from bitproof.harness.execute.accounts import End
from bitproof.harness.execute.failures import Failure, Problem, blame, error_of_hang
from bitproof.harness.execute.host_process import Abandoned, HostLost, HostProcess
from bitproof.harness.execute.links import Line, Links
from bitproof.harness.execute.requests import (
    ARCHIVE,
    VALUES,
    MachineRequest,
    MadeOf,
    MadeOfRequest,
    Request,
    RunAnswer,
    RunRequest,
    SeatedRunRequest,
    Seats,
)
from bitproof.harness.machine.determinism import ENVIRONMENT
from bitproof.harness.machine.devices import Placement, place
from bitproof.harness.options import OnEvent
from bitproof.harness.processes import wire
from bitproof.harness.program import interrupts
from bitproof.harness.program.launched import do_not_wait_for_rank_0
from bitproof.harness.program.search_path import search_path
from bitproof.harness.records import CaseResult

if TYPE_CHECKING:
    from bitproof.harness.options import RunOptions

# After a case's time is up, how long a host may take to say how its rank failed, and rank 0 waits for the others.
_HOST_MARGIN = 15.0
_MARGIN = 30.0
# After a rank failed, how long another one may take to notice. On NCCL it never may: its host waits for the device.
_PEER_SECONDS = 5.0
_START_SECONDS = 300.0
# What a rank leaves: its part of a recording, or of a replay, and what may lie beside it.
_FILES = ("", VALUES, ARCHIVE)
# One call into torch's store, which hears no signal; and the same where nothing is asked of it but a value.
_STORE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_LAST_WORDS = 10.0

A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A rank's first message to rank 0: who it is, and the folder of its run there.

    `node` names its machine, equal on all ranks of one. What it is made of follows, once its host has loaded torch.
    """

    token: str
    rank: int
    world_size: int
    node: str
    run_dir: str


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Rank 0's answer, once all are there: its own run folder, and where this rank's machine writes its logs."""

    run_dir: Path
    own_dir: Path


@dataclass(frozen=True, kw_only=True)
class Failed:
    """On some rank the run of this number has failed: others may wait for it where no error reaches them."""

    run: int


@dataclass(frozen=True, kw_only=True)
class Farewell:
    """A rank takes part no longer; `problem` is what ended it, None where it came to its end."""

    problem: Problem | None = None


Message = RunRequest | CaseResult | Failed | Farewell
"""What rank 0 tells all others."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """How the run of a number ended on one of torchrun's ranks: its end, or the problem for which it has none.

    `clock` is what its machine's monotonic clock lacks to the time of day, on which machines agree. The files that it
    sends along are its `_FILES`, of so many bytes each.
    """

    run: int
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
                    team.is_told = True
                    if problem is not None:
                        raise problem.error()
                    return


@contextmanager
def _joined(run_dir: Path, options: RunOptions) -> Iterator[Team]:
    os.environ.update(ENVIRONMENT)  # as the hosts have it: a manifest tells it
    sys.path[:] = search_path()
    with tempfile.TemporaryDirectory(prefix="bitproof-", ignore_cleanup_errors=True) as work:
        team = Team(Path(run_dir), options, Path(work), int(os.environ["RANK"]))
        problem = None
        try:
            team.join()
            yield team
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = Problem.of(error, f"rank {team.rank}")
            if team.rank and not team.is_told:
                do_not_wait_for_rank_0()  # it is gone, or this rank was interrupted
                is_speaker = os.environ.get("LOCAL_RANK", "0") == "0"  # one of each machine tells what rank 0 cannot
                if is_speaker and isinstance(error, BitproofError):
                    print(error, file=sys.stderr, flush=True)
            raise
        finally:
            with interrupts.held():
                team.close(problem)


class Team:
    """One rank among torchrun's. Rank 0's is the desk at which its cases ask, as a session's is elsewhere."""

    def __init__(self, run_dir: Path, options: RunOptions, work: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.options = options
        self.work = work
        self.rank = rank
        self.world_size = int(os.environ["WORLD_SIZE"])
        self._local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.is_told = False
        """Whether rank 0 has said how all ended, and so tells it to the user, too."""
        self._token = ""
        self._run_number = 0
        self._lost: BitproofError | None = None
        self._num_gpus: int | None = None
        self._lines: dict[int, Line] = {}
        self._made_of: dict[int, Facts] = {}
        self._accounts: dict[int, tuple[Account, Path | None]] = {}
        self._left: dict[int, Problem] = {}
        self._heard: list[Message] = []
        self._failed_at = float("inf")
        self._own_dir = self._first_dir = run_dir.resolve()
        self._store: _Store | None = None  # where rank 0 serves it, its ranks meet there until the end
        self._links = Links(work)
        self._launcher = Launcher()
        self._host = self._start_host()

    def close(self, problem: Problem | None = None) -> None:
        """End the host and all that it started, and leave. `problem` is why, for rank 0."""
        self._host.kill()
        if self.rank and (line := self._lines.get(0)) is not None:
            self._links.tell(line, Farewell(problem=problem))
        self._links.close(_LAST_WORDS if self.rank == 0 or problem is not None else 1.0)
        self._launcher.close()

    def join(self) -> None:
        """Come together with all other ranks, within the time that a case has.

        Raises RankError, naming them, where some do not come, and CaseError where some are made of other things.
        """
        deadline = time.monotonic() + self.options.timeout
        hello = Hello(token="", rank=self.rank, world_size=self.world_size, node=_node(), run_dir=str(self._own_dir))
        if self.rank:
            self._come(hello, deadline)
            return
        try:
            self._call_roll(hello, deadline)
        except BaseException as error:
            self.tell_all(Farewell(problem=Problem.of(error, "rank 0")))
            raise

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
        for line in self._lines.values():
            self._links.tell(line, message)

    def hear(self) -> Message:
        """Any other rank: what rank 0 tells next. Raises RankError when there is no rank 0 any more."""
        while True:
            self._listen()
            if self._heard:
                return self._heard.pop(0)
            self._refuse_lost("while it waited for what to do")
            self._links.wait(0.2)

    def run(self, request: RunRequest) -> None:
        """Any other rank: its part of a run, and how it ended, for rank 0."""
        account, files = self._run(self._localized(request))
        self._links.tell(self._lines[0], account, files)

    def _call_roll(self, own: Hello, deadline: float) -> None:
        """Rank 0: wait for all others, see that all are made of the same, and let them begin."""
        self._token = secrets.token_hex(16)
        arrived: dict[int, Hello] = {0: own}
        if self.world_size > 1:
            port = self._links.listen(os.environ["MASTER_ADDR"])
            addresses = [os.environ["MASTER_ADDR"], socket.gethostname()]
            word = json.dumps({"addresses": addresses, "port": port, "token": self._token})
            self._store = _Store(self.rank == 0, deadline, self._launcher)
            while not self._store.put(word):
                self._wait_for(self._store.where, deadline, arrived)
        while len(arrived) < self.world_size:
            for line, said in self._links.newcomers():
                self._meet(line, said, arrived)
            if len(arrived) < self.world_size:
                self._listen()
                self._refuse_lost("before all had come")
                self._wait_for("", deadline, arrived)
        self._links.stop_listening()
        self._made_of[0] = self._ask_host(MadeOfRequest(), _START_SECONDS).facts
        while len(self._made_of) < self.world_size:
            self._listen()
            self._refuse_lost("before it had said what it is made of")
            self._wait_for("not all said what they are made of", deadline + _HOST_MARGIN, self._made_of)
        differences([self._made_of[rank] for rank in range(self.world_size)], all_told=True).refuse()
        folders: dict[str, Path] = {}
        for rank in sorted(arrived):
            folders.setdefault(arrived[rank].node, Path(arrived[rank].run_dir))
        for rank, line in self._lines.items():
            self._links.tell(line, Welcome(run_dir=self._own_dir, own_dir=folders[arrived[rank].node]))

    def _meet(self, line: Line, said: dict[str, Any], arrived: dict[int, Hello]) -> None:
        """Take a newcomer in, or send it away."""
        if not hmac.compare_digest(str(said.get("token")).encode(), self._token.encode()):
            self._links.part_with(line, "it is of another run")
            return
        try:
            hello: Hello = wire.read(json.dumps(said), Hello)
            is_one_of_us = 0 < hello.rank < self.world_size == hello.world_size and hello.rank not in self._lines
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = CaseError(
                f"rank {said.get('rank')} speaks otherwise than rank 0",
                expected="one release of bitproof on every rank",
                found=str(error),
                fix="bring all machines to one commit",
            )
            self._links.tell(line, Farewell(problem=Problem.of(problem, "rank 0")))
            raise problem from error
        if not is_one_of_us:
            problem = CaseError(
                "a rank came that cannot be one of this run",
                expected=f"each of {tell_ranks(range(1, self.world_size))} once, of {self.world_size}",
                found=f"rank {hello.rank} of {hello.world_size}, on {hello.node}",
                fix="give every process a RANK of its own, and all one WORLD_SIZE",
            )
            self._links.tell(line, Farewell(problem=Problem.of(problem, "rank 0")))
            self._links.part_with(line, "it is none of us")
            raise problem
        self._links.welcome(line, f"rank {hello.rank}")
        self._lines[hello.rank] = line
        arrived[hello.rank] = hello

    def _come(self, hello: Hello, deadline: float) -> None:
        """Any other rank: find rank 0, and wait until it says that all are there."""
        store = _Store(self.rank == 0, deadline, self._launcher)
        while True:
            word = store.get()
            if word is None:
                self._wait_for(store.where, deadline, None)
                continue
            try:
                found = json.loads(word)
                line = self._connect(found["addresses"], found["port"])
                self._token = str(found["token"])
            except (ValueError, KeyError, TypeError, OSError):  # an older run's word, perhaps
                self._wait_for("rank 0 does not listen where torchrun's store says", deadline, None)
                continue
            self._links.tell(line, replace(hello, token=self._token))
            self._lines[0] = line
            self._tell_made_of(line)
            while line.gone is None or line.inbox:
                said = self._links.take(line)
                if said is None:  # rank 0 knows until when to wait for others, and lives
                    self._wait_for("", float("inf"), None)
                    continue
                answer = _read(said[0], Welcome, Farewell)
                if isinstance(answer, Farewell):
                    self.is_told = True
                    raise (answer.problem or Problem.of(RuntimeError("it ended"), "rank 0")).error()
                self._first_dir, self._own_dir = answer.run_dir, answer.own_dir
                return
            del self._lines[0]  # another run's, or one whose ranks are all started anew
            self._wait_for(f"rank 0 left: {line.gone}", deadline, None)

    def _tell_made_of(self, line: Line) -> None:
        """Tell rank 0 what this rank is made of, once its host can; or why it cannot take part."""
        try:
            made_of = self._host.ask(MadeOfRequest(), _START_SECONDS, lambda event: None, lambda: line.gone is not None)
        except Abandoned:
            self._host = self._start_host()
        except HostLost as lost:
            self._links.tell(line, Farewell(problem=Problem.of(lost.error, f"rank {self.rank}")))
            raise lost.error from lost
        else:
            self._links.tell(line, made_of)

    def _connect(self, addresses: Sequence[str], port: int) -> Line:
        problem: OSError = OSError("rank 0 gave no address")
        for address in dict.fromkeys(addresses):
            try:
                return self._links.connect(str(address), int(port), "rank 0")
            except OSError as error:
                problem = error
        raise problem

    def _wait_for(self, what: str, deadline: float, arrived: Collection[int] | None) -> None:
        """A moment, before looking again whether somebody has come. Raises RankError when time is up."""
        self._links.wait(0.2)
        if (ended := self._launcher.ended()) is not None:
            raise ended
        if time.monotonic() < deadline:
            return
        missing = [0] if arrived is None else [rank for rank in range(self.world_size) if rank not in arrived]
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        came = None if arrived is None else tell_ranks(sorted(arrived))
        raise RankError(
            f"{tell_ranks(missing)} of {self.world_size} did not come within {self.options.timeout:g} s",
            rank=missing[0] if len(missing) == 1 else None,
            expected=f"{self.world_size} ranks that meet at {where}",
            found="; ".join(part for part in (came, what) if part) or "nobody",
            fix="start every rank, with one WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give a longer --timeout",
        )

    def _listen(self) -> None:
        """Take all that others have told by now."""
        for rank, line in self._lines.items():
            while (said := self._links.take(line)) is not None:
                self._take(rank, *said)

    def _take(self, rank: int, text: bytes, files: Path | None) -> None:
        if self.rank:
            message = _read(text, RunRequest, CaseResult, Failed, Farewell)
        else:
            message = _read(text, MadeOf, Account, Failed, Farewell)
        match message:
            case Account():
                if message.run == self._run_number:  # one that is late tells of a run that nobody waits for
                    self._accounts[rank] = message, files
            case MadeOf(facts=facts):
                self._made_of[rank] = facts
            case Failed():
                if message.run == self._run_number:
                    self._note_failed()
            case Farewell(problem=problem) if self.rank == 0:
                self._left[rank] = problem or Problem.of(RuntimeError("it ended"), f"rank {rank}")
            case _:
                self._heard.append(message)

    def _gone(self) -> dict[int, str]:
        """Who is gone, and what is known of that."""
        found = {rank: f"{line.gone}" for rank, line in self._lines.items() if line.gone is not None}
        for rank, problem in self._left.items():
            found[rank] = f"it left: {problem.error().what}"
        return found

    def _refuse_lost(self, when: str) -> None:
        """Raise RankError when somebody is gone without whom nothing goes on."""
        error = self._launcher.ended()
        if error is None and (gone := self._gone()):
            ranks = sorted(gone)
            error = RankError(
                f"{tell_ranks(ranks)} vanished {when}",
                rank=ranks[0] if len(ranks) == 1 else None,
                expected=f"{self.world_size} ranks until the end",
                found="; ".join(f"{tell_ranks([rank])}: {why}" for rank, why in sorted(gone.items())),
                fix="see what ended it on its machine: its log there, the kernel's, torchrun's own",
            )
        if error is not None:
            self._lost = self._lost or error
            raise error

    def _run_all(self, request: RunRequest, on_event: OnEvent) -> RunAnswer:
        from bitproof.harness.execute.answers import finish_run

        if self._lost is not None:
            raise self._lost
        self._listen()
        when = f"before {request.system} ran"
        self._refuse_lost(when)
        self._accounts.clear()
        self.tell_all(request)
        answers = self._gather(self._run(request, on_event), request)
        parts = [self.work / f"part{rank}" for rank in range(len(answers))]
        for suffix in _FILES:
            own = (self.work / "part").with_suffix(suffix)
            parts[0].with_suffix(suffix).unlink(missing_ok=True)  # an earlier run's
            if own.exists():
                own.replace(parts[0].with_suffix(suffix))
        for part, (account, content) in zip(parts[1:], answers[1:], strict=True):
            _unpack(account, content, part)
        return finish_run(request, [account.end for account, _ in answers if account.end is not None], parts)

    def _run(self, request: RunRequest, on_event: OnEvent = lambda event: None) -> tuple[Account, list[Path]]:
        """This rank's run: its account, and its files. Never raises BitproofError: an error is an account too."""
        self._run_number += 1
        self._failed_at = float("inf")
        files = [(self.work / "part").with_suffix(suffix) for suffix in _FILES]
        for file in files:
            file.unlink(missing_ok=True)
        seats = Seats(
            ranks=(self.rank,),
            part=str(files[0]),
            store=f"bitproof/{self._token}/{self._run_number}",
            server=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            local_rank=self._local_rank,
        )
        account = Account(run=self._run_number, clock=time.time() - time.monotonic())
        try:
            seated = SeatedRunRequest(run=request, seats=seats)
            end = self._host.ask(seated, request.timeout + _HOST_MARGIN, on_event, self._is_abandoned)
        except Abandoned:
            self._host = self._start_host()
            if (ended := self._launcher.ended()) is not None:
                return replace(account, problem=Problem.of(ended, request.system)), []
            end = End(failure=_ended_for_a_peer(self.rank), place="while it waited for other ranks")
        except Exception as error:
            self._tell_failed()
            if isinstance(error, HostLost):
                self._host, error = self._start_host(), error.error
            return replace(account, problem=Problem.of(error, request.system)), []
        if not end.done:
            self._tell_failed()
        if end.log and self._own_dir != self._first_dir:
            end = replace(end, log=f"{socket.gethostname()}:{self._own_dir / end.log}")
        present = [file for file in files if file.exists()]
        sizes = tuple(file.stat().st_size if file.exists() else 0 for file in files)
        return replace(account, end=end, num_bytes=sizes), present

    def _localized(self, request: RunRequest) -> RunRequest:
        """A request of rank 0's, whose paths are of its machine, with this machine's.

        Of a machine that is not rank 0's the profile is not taken: it would have to be on rank 0's clock.
        """
        if self._own_dir == self._first_dir:
            return request
        logs = self._own_dir / "logs"
        if request.logs.is_relative_to(self._first_dir):
            logs = self._own_dir / request.logs.relative_to(self._first_dir)
        return replace(
            request,
            logs=logs,
            work=self.work / "run",
            profile=None,
            kept_graphs=self.options.kept_graphs if request.kept_graphs else None,
            later=self._localized(request.later) if request.later else None,
        )

    def _tell_failed(self) -> None:
        """Let the other ranks know that this one's run has failed: they may wait for it where no error reaches them."""
        self.tell_all(Failed(run=self._run_number))

    def _note_failed(self) -> None:
        if self._failed_at == float("inf"):
            self._failed_at = time.monotonic()
            if self.rank == 0:
                self._tell_failed()

    def _is_abandoned(self) -> bool:
        """Whether this rank waits in vain.

        That is when somebody is gone, and when another rank failed long enough ago for this one to have told its own
        end, had it come to any.
        """
        self._listen()
        if self._gone() or self._launcher.ended() is not None:
            self._note_failed()
            return True
        return time.monotonic() - self._failed_at > _PEER_SECONDS

    def _ask_host(self, request: Request[A], timeout: float, on_event: OnEvent = lambda event: None) -> A:
        """This rank's own host answers; one that was lost is replaced."""
        try:
            return self._host.ask(request, timeout, on_event)
        except HostLost as lost:
            self._host = self._start_host()
            raise lost.error from lost

    def _start_host(self) -> HostProcess:
        log = self._own_dir / "logs" / ("host.log" if self.rank == 0 else f"host{self.rank}.log")
        return HostProcess(log, temporary=self.work, verbose=self.options.verbose, is_alone=False)

    def _gather(self, own: tuple[Account, list[Path]], run: RunRequest) -> list[tuple[Account, Path | None]]:
        """Every rank's account, each with a good end, and its files' bytes in one, in rank order.

        Raises the error of the rank to blame, and RankError when a rank says nothing in time, or is gone.
        """
        is_bad = own[0].end is None or not own[0].end.done
        limit = time.monotonic() + (_MARGIN if is_bad else run.timeout + _MARGIN)
        waited_for = set(range(1, self.world_size))
        while True:
            self._listen()
            waited_for -= self._accounts.keys()
            if not waited_for:
                break
            self._launcher_must_live()
            if waited_for & self._gone().keys():
                break
            is_late = time.monotonic() > limit
            if is_late and not any(self._lines[rank].is_within_message for rank in waited_for):
                break
            self._links.wait(0.2)
        answers = [(own[0], None), *(self._accounts[rank] for rank in sorted(self._accounts))]
        accounts = [account for account, _ in answers]
        if waited_for & self._gone().keys() and not any(_failed_by_itself(account) for account in accounts):
            self._note_failed()
            self._refuse_lost(f"while {run.system} ran")
        problem = next((account.problem for account in accounts if account.problem), None)
        silent = sorted(waited_for)
        error = problem.error() if problem else _error_of(accounts, run, silent)
        if error is not None:
            self._lost = error if silent else None
            raise error
        return answers

    def _launcher_must_live(self) -> None:
        if (ended := self._launcher.ended()) is not None:
            self._lost = ended
            raise ended


class Launcher:
    """Who started this rank, and what all ranks of a run meet at: once it is gone, nobody ends what it started."""

    def __init__(self) -> None:
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store: socket.socket | None = None

    def watch_store(self, address: str, port: int) -> None:
        """Notice from now on when the store is closed, by a connection that says nothing."""
        if self._store is None:
            with suppress(OSError):
                self._store = socket.create_connection((address, port), timeout=_STORE_SECONDS)
                self._store.setblocking(False)

    def ended(self) -> RankError | None:
        """The error to raise when it is gone, None while it is there."""
        if self._parent is not None and os.getppid() != self._parent:
            return RankError(
                f"torchrun has ended on {socket.gethostname()}, whose rank {os.environ['RANK']} it had started",
                expected="torchrun's agents to live until their ranks have ended",
                fix="see what ended it on that machine: the kernel's log, or a scheduler's",
            )
        if self._store is not None and _is_closed(self._store):
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return RankError(
                f"the store at which ranks meet has ended, at {where}",
                expected="torchrun's agent on that machine to live until all ranks have ended",
                fix="see what ended it there",
            )
        return None

    def close(self) -> None:
        """Watch no longer."""
        if self._store is not None:
            self._store.close()
            self._store = None


class _Store:
    """torch's store, from which the others learn where rank 0 is. It is torchrun's, or rank 0 serves it.

    What it does in C++ hears no signal and may wait for long, so it does that in a thread, and no longer than told.
    `where` says what it waits for, "" when it is there.
    """

    def __init__(self, is_rank_0: bool, deadline: float, launcher: Launcher) -> None:
        self._deadline = deadline
        self._launcher = launcher
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._is_server = is_rank_0 and not self._is_torchruns
        self._store: Any = None
        self.where = ""

    def put(self, word: str) -> bool:
        """Leave rank 0's word; False where there is no store yet."""
        return self._use(lambda store: (store.set(_key(), word), True)[1]) is True

    def get(self) -> str | None:
        """Rank 0's word; None where there is none yet."""

        def look(store: Any) -> str | None:
            try:
                store.wait([_key()], timedelta(seconds=_LOOK_SECONDS))
            except RuntimeError:  # it times out with a subclass of it, and so it ends when its server does
                return None
            return cast(bytes, store.get(_key())).decode()

        found = self._use(look)
        if found is None and not self.where:
            self.where = "rank 0 has not come to the store"
        return cast("str | None", found)

    def _use(self, act: Callable[[Any], object]) -> object:
        self.where = ""
        at = f"{self._address}:{self._port}"
        if not self._is_server:
            try:
                socket.create_connection((self._address, self._port), timeout=_LOOK_SECONDS).close()
            except OSError as error:
                self._store, self.where = None, f"nobody listens at {at}: {error.strerror or error}"
                return None
            if self._is_torchruns:
                self._launcher.watch_store(self._address, self._port)
        try:
            if self._store is None:
                self._store = _apart(self._open, self._deadline)
            return _apart(lambda: act(self._store), self._deadline)
        except TimeoutError:
            what = (
                "its own store is not open yet" if self._is_server else "what listens there does not answer as a store"
            )
            self._store, self.where = None, f"at {at} {what}"
        except Exception as error:
            self._store, self.where = None, f"the store at {at}: {type(error).__name__}: {error}"
        return None

    def _open(self) -> Any:
        from torch.distributed import TCPStore

        return TCPStore(
            self._address,
            self._port,
            world_size=None,
            is_master=self._is_server,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )


def _apart(act: Callable[[], A], deadline: float) -> A:
    """What `act` gives, from a thread, so that signals are heard meanwhile. Raises TimeoutError when it takes too long.

    Python does not end well with a thread in the middle of C++, so an interrupt waits a moment for it.
    """
    found: list[A] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            found.append(act())
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work, name="bitproof-store", daemon=True)
    thread.start()
    limit = min(deadline, time.monotonic() + 4 * _STORE_SECONDS)
    try:
        while thread.is_alive() and time.monotonic() < limit:
            thread.join(0.05)
    finally:
        if thread.is_alive():
            thread.join(2 * _LOOK_SECONDS)
    if problems:
        raise problems[0]
    if not found:
        raise TimeoutError
    return found[0]


def _key() -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"bitproof/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}/rank0"


def _node() -> str:
    """A name for this rank's machine, equal on all its ranks: torchrun counts its agents, and else its host's name."""
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


def _is_closed(watched: socket.socket) -> bool:
    try:
        return watched.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _read(text: bytes, *kinds: type) -> Any:
    """A message of somebody who is known. Raises RankError for what is none."""
    try:
        return wire.read(text, *kinds)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RankError(
            "a rank said what no rank says", found=str(error), fix="bring all machines to one commit"
        ) from error


def _ended_for_a_peer(rank: int) -> Failure:
    what = "was ended, as it still waited for a rank that had failed"
    return Failure(rank=rank, time=time.monotonic(), what=what, secondary=True)


def _failed_by_itself(account: Account) -> bool:
    """Whether a rank has a failure to tell that no other rank's end explains."""
    failure = account.end.failure if account.end else None
    return account.problem is not None or (failure is not None and not failure.secondary)


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


def _unpack(account: Account, content: Path | None, part: Path) -> None:
    """Write the files that came with an account beside each other, as the rank had them."""
    for suffix in _FILES:
        part.with_suffix(suffix).unlink(missing_ok=True)  # an earlier run's
    if content is None:
        return
    if sum(account.num_bytes) != content.stat().st_size or len(account.num_bytes) != len(_FILES):
        raise RankError(
            "a rank's files did not arrive whole",
            expected=f"{sum(account.num_bytes)} bytes",
            found=f"{content.stat().st_size} bytes",
        )
    with content.open("rb") as source:
        for suffix, size in zip(_FILES, account.num_bytes, strict=True):
            with part.with_suffix(suffix).open("wb") as file:
                while size > 0 and (chunk := source.read(min(size, 1 << 20))):
                    size -= file.write(chunk)
    content.unlink()
