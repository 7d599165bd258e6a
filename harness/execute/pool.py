"""A pool of sessions: submitted work runs in the next free place, and can be cancelled while it runs.

A place is a session, or several that a piece of work uses together. Threads of the command's process serve places; they
only wait and compare. Neither the place of a task nor concurrent tasks change any of its bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from bitproof.harness.execute.session import Session

A = TypeVar("A")

Sessions = Sequence[Session]


class PooledTask(Generic[A]):
    """A submitted piece of work."""

    def __init__(self, work: Callable[[Sessions], A]) -> None:
        self._work = work
        self._answer: Future[A] = Future()
        self._lock = threading.Lock()
        self._place: Sessions = ()
        self._is_cancelled = False

    @property
    def is_done(self) -> bool:
        """Whether its result is available, and its place free again."""
        return self._answer.done()

    def result(self) -> A:
        """The work's result, once it is available. Raises the work's error, CancelledError if it never began."""
        return self._answer.result()

    def run(self, place: Sessions) -> None:
        """Do the work in a place; called by the pool only. Never raises."""
        with self._lock:
            self._place = place
        if self._answer.set_running_or_notify_cancel():
            try:
                answer = self._work(place)
            except BaseException as error:
                self._leave()
                self._answer.set_exception(error)
            else:
                self._leave()
                self._answer.set_result(answer)

    def _leave(self) -> None:
        """Free the place, whose sessions answer again."""
        with self._lock:
            for session in self._place if self._is_cancelled else ():
                session.resume()
            self._place = ()

    def abandon(self) -> Future[A] | None:
        """Cancel the task. Returns None if it had not begun; else a future that is done when its sessions have
        stopped."""
        if self._answer.cancel():
            return None
        with self._lock:
            self._is_cancelled = True
            for session in self._place:
                session.abandon()
        return self._answer


class Pool:
    """Places, each with a thread that takes the next piece of work as soon as its last is done."""

    def __init__(self, places: Sequence[Sessions]) -> None:
        self.places = places
        self._waiting: SimpleQueue[PooledTask[Any] | None] = SimpleQueue()
        self._submitted: list[PooledTask[Any]] = []
        self._threads = [threading.Thread(target=self._serve, args=(place,), daemon=True) for place in places]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Sessions], A]) -> PooledTask[A]:
        """Queue work for the next free place; tasks begin in the order of submission."""
        task: PooledTask[A] = PooledTask(work)
        self._submitted = [*(other for other in self._submitted if not other.is_done), task]
        self._waiting.put(task)
        return task

    def cancel(self, *tasks: PooledTask[Any]) -> None:
        """End unneeded tasks; returns when their sessions answer again. Does nothing for a finished task."""
        wait([under_way for task in tasks if (under_way := task.abandon()) is not None])

    def close(self) -> None:
        """Cancel all unfinished tasks, and end the threads. The sessions stay usable."""
        self.cancel(*self._submitted)
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Close the pool, with sessions that answer nothing more."""
        for session in (session for place in self.places for session in place):
            session.end()
        self.close()

    def _serve(self, place: Sessions) -> None:
        while (task := self._waiting.get()) is not None:
            task.run(place)
