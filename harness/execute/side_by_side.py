"""The runs of one case side by side: its two systems, and their second runs, each on a host of its own.

What a run computes depends on its case alone, and the case's verdict is made of its runs in one order, whichever ended
first: so nothing but the time differs. Where somebody else's code takes part, a system or a pass, runs take turns: what
a reference recorded is read before such code starts, which could rewrite it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

from bitproof.harness.case import PREPARED, Case
from bitproof.harness.execute.session import Session
from bitproof.harness.options import ROLES, Role, RunOptions
from bitproof.harness.records import Comparison
from bitproof.harness.systems.registry import BUILT_IN

A = TypeVar("A")

Arm = tuple[Role, str]
"""A side of a case, and which of its runs: "first" or "control"."""


def groups_of(case: Case, options: RunOptions, most: int) -> list[list[Arm]]:
    """The runs that are certain to be needed, in as many groups as `most` allows; those of a group take turns.

    One group where nothing may go side by side. Both runs of what is traced are of one group: they share that.
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
    """How many steps a second run takes, and a remark where that is not all: those up to the first difference will do.

    A fault may strike later than that, and one that never strikes is an error.
    """
    first = comparison.first_divergence
    if options.control != "up_to_difference" or first is None or options.inject is not None:
        return case.steps, []
    steps = first.step + 1
    text = f"second runs took {steps} of {case.steps} steps: those up to the first difference"
    return steps, [text] if steps < case.steps else []


class Begun(Generic[A]):
    """Runs that were begun, and their answers as they come."""

    def __init__(self, groups: Sequence[Sequence[Arm]]) -> None:
        self._answers: dict[Arm, Future[A]] = {arm: Future() for group in groups for arm in group}

    def has(self, arm: Arm) -> bool:
        """Whether a run was begun."""
        return arm in self._answers

    def answer(self, arm: Arm) -> A:
        """A run's answer, once it is there. Raises what the run does."""
        return self._answers[arm].result()

    def take(self, group: Sequence[Arm], ask: Callable[[Arm], A]) -> None:
        """Ask for the runs of a group, one after another. After one that fails the others are not wanted."""
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
    """Have each group's runs asked for at a session of its own. Those still under way when the block ends are ended."""
    runs: Begun[A] = Begun(groups)
    threads = [
        threading.Thread(target=runs.take, args=(group, lambda arm, session=session: ask(session, arm)), daemon=True)
        for group, session in zip(groups, sessions, strict=False)
    ]
    try:
        for thread in threads:
            thread.start()
        yield runs
    finally:
        for thread, session in zip(threads, sessions, strict=False):
            if thread.is_alive():
                session.abandon()
        for thread in threads:
            thread.join()
        for session in sessions:
            session.resume()
