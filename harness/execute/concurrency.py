"""Concurrency: several cases, or the runs of a single case, over a pool of sessions.

A run's results depend only on its case, and a case's verdict uses its runs in a fixed order, whichever ended first. So
concurrency changes only the time. With a user's system or pass, runs are sequential: the reference's recording is read
before such code starts, as it could rewrite the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from bitproof.harness.case import PREPARED, Case
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.host_process import Abandoned
from bitproof.harness.execute.pool import Pool, Sessions
from bitproof.harness.execute.session import Session
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
from bitproof.harness.options import ROLES, OnEvent, Role, RunOptions
from bitproof.harness.records import CaseResult, Comparison, Event
from bitproof.harness.systems.registry import BUILT_IN

A = TypeVar("A")

Judge = Callable[[Case, Placement, Sessions, OnEvent], CaseResult]

Arm = tuple[Role, str]
"""A side of a case and a run of it: "first" or "control"."""


@dataclass(frozen=True)
class Concurrency:
    """How many cases run at once, and how many runs of each; `num_ranks` is the number of ranks of the largest case.

    `takes_turns`: nothing may run concurrently, however large the other numbers are.
    """

    num_workers: int = 1
    num_runs: int = 1
    num_ranks: int = 1
    cores: int = 1
    memory: int | None = None
    takes_turns: bool = True

    @property
    def is_sequential(self) -> bool:
        """Whether nothing runs concurrently."""
        return self.num_workers * self.num_runs == 1

    def __str__(self) -> str:
        runs = self.num_workers * self.num_runs
        takes = runs * (HOST_BYTES + self.num_ranks * RANK_BYTES) / 2**30
        free = "" if self.memory is None else f" of {self.memory / 2**30:.1f} free"
        counted = " and ".join(
            f"{number} {what}{'s' if number > 1 else ''} {of}"
            for number, what, of in ((self.num_workers, "case", "at once"), (self.num_runs, "run", "of a case at once"))
            if number > 1
        )
        ranks = f"{runs * self.num_ranks} ranks at most on {self.cores} core{'s' if self.cores > 1 else ''}"
        return f"side by side: {counted}; {ranks}, some {takes:.1f} GiB{free}"


def plan_concurrency(cases: Sequence[Case], options: RunOptions) -> Concurrency:
    """Plan the cases and runs that are concurrent on this machine.

    As many cases as requested, as far as memory allows; with "auto" as many as have a core per rank. For example, 8
    cores and cases of 2 ranks allow 4 cases. Remaining cores run a case's own runs concurrently. Raises UsageError if
    concurrent cases are requested under torchrun or on GPUs.
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
        return Concurrency()
    ranks, cores, memory = max(case.most_ranks for case in cases), cores_for_runs(), free_memory()
    most = num_at_once(ranks, cores, memory)
    asked = most if options.jobs == "auto" else num_in_memory(ranks, memory, options.jobs)
    workers = min(len(cases), asked)
    runs = max(len(groups_of(case, options, most // workers)) for case in cases)
    return Concurrency(workers, runs, ranks, cores, memory, takes_turns=False)


def sessions_of(first: Session, plan: Concurrency) -> list[Sessions]:
    """Each worker's sessions. `first` already exists, and ends the others too."""
    sessions = [first, *(first.another() for _ in range(plan.num_workers * plan.num_runs - 1))]
    return [sessions[worker :: plan.num_workers] for worker in range(plan.num_workers)]


def judge_at_once(
    places: Sequence[Sessions], todo: Sequence[tuple[Case, Placement]], judge: Judge, on_event: OnEvent
) -> Iterator[CaseResult]:
    """Yield results as cases are judged. Events and results reach the caller in its own thread, in sequence.

    If the caller stops early, so does everything that runs. Raises any error of `judge`, which turns expected errors
    into results itself.
    """
    told: SimpleQueue[Event | CaseResult | BaseException] = SimpleQueue()

    def judged(case: Case, placement: Placement, sessions: Sessions) -> None:
        try:
            for session in sessions:
                session.begin_case()
            told.put(judge(case, placement, sessions, told.put))
        except Abandoned:
            pass
        except BaseException as error:
            told.put(error)

    pool = Pool(places)
    try:
        for case, placement in todo:
            pool.submit(partial(judged, case, placement))
        left = len(todo)
        while left:
            match told.get():
                case CaseResult() as result:
                    left -= 1
                    yield result
                case BaseException() as error:
                    raise error
                case event:
                    on_event(event)
    finally:
        pool.end()


def groups_of(case: Case, options: RunOptions, most: int) -> list[list[Arm]]:
    """The runs that are certain to be needed, in at most `most` groups; runs within a group are sequential.

    Returns a single group if nothing may be concurrent. Both runs of a traced system share a group, as they share the
    trace.
    """
    arms = ("first", "control") if options.control == "always" else ("first",)
    is_ours = case.reference in BUILT_IN and case.candidate in BUILT_IN and not options.extra_passes
    if most < 2 or not is_ours:
        return [[(role, arm) for arm in arms for role in ROLES]]
    groups: list[list[Arm]] = [[(role, arm) for arm in arms] for role in ROLES]
    for role, group in zip(ROLES, list(groups), strict=True):
        if len(groups) < most and len(group) > 1 and getattr(case, role) not in PREPARED:
            groups.append([group.pop()])
    return groups


def steps_of_control(case: Case, options: RunOptions, comparison: Comparison) -> tuple[int, list[str]]:
    """How many steps a second run takes, and a remark if it is shortened: steps up to the first difference suffice.

    For example, a difference in step 3 of 20 needs 4 steps. With a deliberate fault all steps run, since the fault may
    strike later, and a fault that never strikes is an error.
    """
    first = comparison.first_divergence
    if options.control != "up_to_difference" or first is None or options.inject is not None:
        return case.steps, []
    steps = first.step + 1
    text = f"second runs took {steps} of {case.steps} steps: those up to the first difference"
    return steps, [text] if steps < case.steps else []


class Begun(Generic[A]):
    """Runs that were started, and their answers as they come."""

    def __init__(self, groups: Sequence[Sequence[Arm]]) -> None:
        self._answers: dict[Arm, Future[A]] = {arm: Future() for group in groups for arm in group}

    def has(self, arm: Arm) -> bool:
        """Whether a run was started."""
        return arm in self._answers

    def answer(self, arm: Arm) -> A:
        """Wait for a run and return its answer. Raises what the run raises."""
        return self._answers[arm].result()

    def take(self, group: Sequence[Arm], ask: Callable[[Arm], A]) -> None:
        """Ask for the runs of a group in sequence. If a run fails, the rest are not asked for and get its error."""
        problem: BaseException | None = None
        for arm in group:
            try:
                if problem is not None:
                    raise problem
                self._answers[arm].set_result(ask(arm))
            except BaseException as error:
                problem = error
                self._answers[arm].set_exception(error)


@contextmanager
def begun(
    groups: Sequence[Sequence[Arm]], sessions: Sequence[Session], ask: Callable[[Session, Arm], A]
) -> Iterator[Begun[A]]:
    """Ask for each group's runs in a session of its own; cancel runs under way when the block ends."""
    runs: Begun[A] = Begun(groups)

    def take(group: Sequence[Arm], place: Sessions) -> None:
        runs.take(group, partial(ask, place[0]))

    pool = Pool([(session,) for session in sessions])
    try:
        for group in groups:
            pool.submit(partial(take, group))
        yield runs
    finally:
        pool.close()
