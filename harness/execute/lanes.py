"""Cases side by side: lanes, each of which takes the next case as soon as its last is judged.

A lane is a thread of the command's process, which only waits and compares, and has hosts of its own: one, or where
cores allow it several, at which the runs of one case go side by side (`execute/side_by_side.py`). Events and results
reach the caller in its own thread, one at a time. Which lane judges a case changes none of its bits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.host_process import Abandoned
from bitproof.harness.execute.session import Session
from bitproof.harness.execute.side_by_side import groups_of
from bitproof.harness.execute.transport import is_torchrun
from bitproof.harness.machine.capacity import (
    HOST_BYTES,
    RANK_BYTES,
    cores_for_runs,
    free_memory,
    num_at_once,
    num_in_memory,
)
from bitproof.harness.machine.describe import gpu_models
from bitproof.harness.machine.devices import Placement
from bitproof.harness.options import OnEvent, RunOptions
from bitproof.harness.records import CaseResult, Event

Judge = Callable[[Case, Placement, Sequence[Session], OnEvent], CaseResult]


@dataclass(frozen=True)
class Plan:
    """How many cases go at once, and how many runs of each; `num_ranks` is how many the largest case has.

    With `takes_turns` nothing may go at once, however much room there is.
    """

    num_lanes: int = 1
    num_runs: int = 1
    num_ranks: int = 1
    cores: int = 1
    memory: int | None = None
    takes_turns: bool = True

    @property
    def is_sequential(self) -> bool:
        """Whether nothing goes side by side."""
        return self.num_lanes * self.num_runs == 1

    def __str__(self) -> str:
        runs = self.num_lanes * self.num_runs
        takes = runs * (HOST_BYTES + self.num_ranks * RANK_BYTES) / 2**30
        free = "" if self.memory is None else f" of {self.memory / 2**30:.1f} free"
        counted = " and ".join(
            f"{number} {what}{'s' if number > 1 else ''} {of}"
            for number, what, of in ((self.num_lanes, "case", "at once"), (self.num_runs, "run", "of a case at once"))
            if number > 1
        )
        ranks = f"{runs * self.num_ranks} ranks at most on {self.cores} core{'s' if self.cores > 1 else ''}"
        return f"side by side: {counted}; {ranks}, some {takes:.1f} GiB{free}"


def plan_lanes(cases: Sequence[Case], options: RunOptions) -> Plan:
    """What goes side by side on this machine. Raises UsageError where cases cannot, and somebody asks for it.

    As many cases as are asked for, as far as there is memory; with "auto" as many as find a core a rank. What cores are
    left then has the runs of one case go side by side.
    """
    may_use_gpus = options.device == "cuda" or (options.device == "auto" and bool(gpu_models()))
    if (is_torchrun() or may_use_gpus) and options.jobs not in (1, "auto"):
        what = "the ranks that torchrun made" if is_torchrun() else "GPUs"
        raise UsageError(
            f"-j has cases run side by side, and {what} take one case at a time",
            expected="-j 1" + ("" if is_torchrun() else ", or --device cpu"),
            found=f"-j {options.jobs}",
        )
    if is_torchrun() or may_use_gpus or not cases:
        return Plan()
    ranks, cores, memory = max(case.most_ranks for case in cases), cores_for_runs(), free_memory()
    room = num_at_once(ranks, cores, memory)
    asked = room if options.jobs == "auto" else num_in_memory(ranks, memory, options.jobs)
    lanes = min(len(cases), asked)
    runs = max(len(groups_of(case, options, room // lanes)) for case in cases)
    return Plan(lanes, runs, ranks, cores, memory, takes_turns=False)


class Lanes:
    """The lanes of one call. `first` is the session that is there in any case; it ends the others, too."""

    def __init__(self, first: Session, plan: Plan) -> None:
        sessions = [first, *(first.another() for _ in range(plan.num_lanes * plan.num_runs - 1))]
        self._lanes = [sessions[lane :: plan.num_lanes] for lane in range(plan.num_lanes)]

    def judged(self, todo: Sequence[tuple[Case, Placement]], judge: Judge, on_event: OnEvent) -> Iterator[CaseResult]:
        """The cases' results, as they come. When the caller stops early, so does all that runs.

        Raises what `judge` raises, which is what none of it makes a result of.
        """
        waiting, told = deque(todo), SimpleQueue[Event | CaseResult | BaseException | None]()

        def work(sessions: Sequence[Session]) -> None:
            try:
                while (found := _next(waiting)) is not None:
                    for session in sessions:
                        session.begin_case()
                    told.put(judge(*found, sessions, told.put))
            except Abandoned:
                pass
            except BaseException as error:
                told.put(error)
            finally:
                told.put(None)

        threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in self._lanes]
        try:
            for thread in threads:
                thread.start()
            at_work = len(threads)
            while at_work:
                match told.get():
                    case None:
                        at_work -= 1
                    case CaseResult() as result:
                        yield result
                    case BaseException() as error:
                        raise error
                    case event:
                        on_event(event)
        finally:
            waiting.clear()
            for session in (session for lane in self._lanes for session in lane):
                session.end()
            for thread in threads:
                thread.join()


def _next(waiting: deque[tuple[Case, Placement]]) -> tuple[Case, Placement] | None:
    with suppress(IndexError):
        return waiting.popleft()
    return None
