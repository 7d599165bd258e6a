"""Runs that are likely to be requested next, started early in a pool.

An early run has the same result as a late run: a run depends on its settings, not on its time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Generic, TypeVar

from bitproof.harness.execute.pool import Pool, PooledTask, Sessions
from bitproof.harness.execute.session import Session

T = TypeVar("T", bound=Hashable)
A = TypeVar("A")


class SpeculativeRuns(Generic[T, A]):
    """Running speculative runs, and results not requested yet.

    `run` makes a run in a session; `ranks_of` is its number of ranks. With `cores`, a run starts early only if each
    rank has a core.
    """

    def __init__(
        self, pool: Pool, run: Callable[[Session, T], A], ranks_of: Callable[[T], int], cores: int | None = None
    ) -> None:
        self._pool = pool
        self._run = run
        self._ranks_of = ranks_of
        self._cores = cores
        self._tasks: dict[T, PooledTask[A]] = {}

    def begin(self, likely: Iterator[T]) -> None:
        """Start the runs that are likely next, as far as there is capacity; cancel others that are under way."""
        wanted: list[T] = []
        ranks = 0
        for found in likely:
            ranks += self._ranks_of(found)
            # The most likely run starts even if it needs more cores than there are.
            is_too_many = self._cores is not None and ranks > self._cores
            if len(wanted) == len(self._pool.places) or (wanted and is_too_many):
                break
            wanted.append(found)
        self._drop([found for found in self._tasks if found not in wanted])
        for found in wanted:
            if found not in self._tasks:
                self._tasks[found] = self._pool.submit(partial(self._run_at, found))

    def result(self, wanted: T) -> A:
        """A run's result; starts the run if it has not started yet. Raises what the run raises."""
        if wanted not in self._tasks:
            self.begin(iter([wanted]))
        return self._tasks[wanted].result()

    def drop_all(self) -> None:
        """Cancel the runs under way, so that sessions are free for others."""
        self._drop([*self._tasks])

    def _run_at(self, found: T, place: Sessions) -> A:
        return self._run(place[0], found)

    def _drop(self, unwanted: list[T]) -> None:
        under_way = [found for found in unwanted if not self._tasks[found].is_done]
        self._pool.cancel(*(self._tasks.pop(found) for found in under_way))
