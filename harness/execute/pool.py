"""One pool of sessions: work is submitted, takes the next place that is free, and can be cancelled while it runs.

A place is one session, or several that one piece of work uses together. Threads of the command's process serve places;
they only wait and compare. Which place does a piece of work, and beside what, changes none of its bits.
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
    """A piece of work that was submitted."""

    def __init__(self, work: Callable[[Sessions], A]) -> None:
        self._work = work
        self._answer: Future[A] = Future()
        self._lock = threading.Lock()
        self._place: Sessions = ()
        self._is_cancelled = False

    @property
    def is_done(self) -> bool:
        """Whether its result is there, and its place free again."""
        return self._answer.done()

    def result(self) -> A:
        """What the work returned, once it is there. Raises what the work raised, CancelledError if it never began."""
        return self._answer.result()

    def run(self, place: Sessions) -> None:
        """Do the work at a place, for the pool alone. Nothing that it raises gets out."""
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
        """Give the place back, whose sessions answer again."""
        with self._lock:
            for session in self._place if self._is_cancelled else ():
                session.resume()
            self._place = ()

    def abandon(self) -> Future[A] | None:
        """Let it never begin, or have its sessions end what they do for it: what says when they have, None at once."""
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
        """Have work done at the next place that is free; tasks begin in the order in which they were submitted."""
        task: PooledTask[A] = PooledTask(work)
        self._submitted = [*(other for other in self._submitted if not other.is_done), task]
        self._waiting.put(task)
        return task

    def cancel(self, *tasks: PooledTask[Any]) -> None:
        """End unneeded tasks; returns when their sessions answer again. Does nothing for a finished one."""
        wait([under_way for task in tasks if (under_way := task.abandon()) is not None])

    def close(self) -> None:
        """Cancel all that is not done, and end the threads. The sessions go on."""
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
