"""Runs several cases at the same time, each in its own session: a host process with the ranks that it forks.

A run's results depend only on its case, so concurrency changes only the time. With too few cores, concurrent runs take
longer; with too little memory, they crash the machine. So with `-j auto`, cases run concurrently only if there is a
core for each rank, and the memory that each rank needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.host_process import Abandoned
from bitproof.harness.execute.session import Session
from bitproof.harness.execute.transport import is_torchrun
from bitproof.harness.machine.capacity import CONTROL_GROUPS, free_memory
from bitproof.harness.machine.describe import gpu_models
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import OnEvent, RunOptions
from bitproof.harness.records import CaseResult, Event

HOST_BYTES = 400 << 20
"""Memory of a host process with its stages: 231 MiB for moe_seq while its ranks run, more while it traces."""
RANK_BYTES = 100 << 20
"""Unshared memory of a rank: 53 to 59 MiB for each of moe_seq's eight. A user's system may need any amount."""

Judge = Callable[[Case, Placement, Session, OnEvent], CaseResult]


@dataclass(frozen=True)
class Concurrency:
    """How many cases run at the same time, with the facts that determined this number.

    - `num_ranks`: ranks of the largest case.
    - `cores`: cores that runs may use.
    - `memory`: free bytes; None if unknown.
    """

    num_cases: int = 1
    num_ranks: int = 1
    cores: int = 1
    memory: int | None = None

    def __str__(self) -> str:
        takes = self.num_cases * (HOST_BYTES + self.num_ranks * RANK_BYTES) / 2**30
        free = "" if self.memory is None else f" of {self.memory / 2**30:.1f} free"
        ranks = self.num_cases * self.num_ranks
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        needs = f"{ranks} ranks at most on {cores}, some {takes:.1f} GiB{free}"
        return f"side by side: {self.num_cases} cases at once; {needs}"


def plan_concurrency(cases: Sequence[Case], options: RunOptions) -> Concurrency:
    """Decide how many cases run at the same time: the requested number, or fewer if memory is short.

    With "auto", it is the number of cases for whose ranks there are cores and memory. Raises UsageError for more than 1
    under torchrun or on GPUs.
    """
    may_use_gpus = options.device == "cuda" or (options.device == "auto" and bool(gpu_models()))
    if (is_torchrun() or may_use_gpus) and options.jobs not in (1, "auto"):
        what = "the ranks that torchrun made" if is_torchrun() else "GPUs"
        raise UsageError(
            f"-j has cases run side by side, and {what} take one case at a time",
            expected="-j 1" + ("" if is_torchrun() else ", or --device cpu"),
            found=f"-j {options.jobs}",
        )
    # torchrun's ranks and GPUs take a single case at a time.
    if is_torchrun() or may_use_gpus or not cases:
        return Concurrency()
    ranks, cores, memory = max(case.most_ranks for case in cases), cores_for_runs(), free_memory()
    jobs = options.jobs
    most = num_at_once(ranks, cores, memory) if jobs == "auto" else num_in_memory(ranks, memory, jobs)
    return Concurrency(min(len(cases), most), ranks, cores, memory)


def judge_at_once(
    sessions: Sequence[Session], todo: Sequence[tuple[Case, Placement]], judge: Judge, on_event: OnEvent
) -> Iterator[CaseResult]:
    """Judge several cases at the same time, one in each session, and yield each result as soon as it is known.

    `on_event` is called in the caller's thread. Closing the iterator ends running cases.
    """
    # All threads put events, results and errors into a queue, so that `on_event` runs in the caller's thread only.
    answers: SimpleQueue[Event | CaseResult | BaseException] = SimpleQueue()
    free: SimpleQueue[Session] = SimpleQueue()
    for session in sessions:
        free.put(session)

    def judged(case: Case, placement: Placement) -> None:
        # There are as many threads as sessions, so one is always free.
        session = free.get()
        try:
            session.begin_case()
            answers.put(judge(case, placement, session, answers.put))
        except Abandoned:
            # The caller has closed the iterator and reads no more results.
            pass
        except BaseException as error:
            answers.put(error)
        finally:
            free.put(session)

    # The threads only wait and compare: the cases' work is in the sessions' processes.
    threads = ThreadPoolExecutor(len(sessions))
    try:
        for case, placement in todo:
            threads.submit(judged, case, placement)
        left = len(todo)
        while left:
            match answers.get():
                case CaseResult() as result:
                    left -= 1
                    yield result
                case BaseException() as error:
                    raise error
                case event:
                    on_event(event)
    finally:
        # Threads wait for their sessions' hosts, so end the requests first: each thread then gets Abandoned.
        for session in sessions:
            session.end()
        threads.shutdown(cancel_futures=True)


def cores_for_runs() -> int:
    """Return how many cores this process may use, limited by its affinity and its container's quota.

    Workers of pytest-xdist share the cores equally.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        # For example `200000 100000`: 200 ms of CPU time in each 100 ms, so two cores.
        quota, period = (CONTROL_GROUPS / "cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period)) if quota != "max" else cores
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return max(1, cores // int(workers) if workers.isdecimal() and int(workers) else cores)


def num_at_once(num_ranks: int, cores: int, memory: int | None) -> int:
    """Return how many runs may take place at once, given `cores` and `memory`; at least 1.

    Each run has a host process and `num_ranks` ranks.
    """
    return num_in_memory(num_ranks, memory, most=cores // num_ranks)


def num_in_memory(num_ranks: int, memory: int | None, most: int) -> int:
    """Return how many runs fit into memory at once, from 1 to `most`. Each run has a host process and `num_ranks`
    ranks.
    """
    fit = most if memory is None else min(most, memory // (HOST_BYTES + num_ranks * RANK_BYTES))
    return max(1, fit)
