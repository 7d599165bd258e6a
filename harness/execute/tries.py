"""Runs that may be wanted, begun ahead of the question, each at a session of its own.

Who asks for a result gets the one that a run begun then would have had: a run depends on what it is of, not on when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from bitproof.harness.execute.session import Session

T = TypeVar("T", bound=Hashable)
A = TypeVar("A")


@dataclass
class _UnderWay(Generic[A]):
    session: Session
    thread: threading.Thread
    result: Future[A]


class Tries(Generic[T, A]):
    """Runs under way, and results that nobody has asked for yet.

    `run` runs a try at a session, in a thread of its own; `ranks_of` says how many ranks a try has. With `cores` no try
    is begun ahead whose ranks would not find one each.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        run: Callable[[Session, T], A],
        ranks_of: Callable[[T], int],
        cores: int | None = None,
    ) -> None:
        self._free = list(sessions)
        self._run = run
        self._ranks_of = ranks_of
        self._cores = cores
        self._under_way: dict[T, _UnderWay[A]] = {}
        self._results: dict[T, Future[A]] = {}

    def begin(self, tries: Iterator[T]) -> None:
        """Have the next tries run, as far as there is room; end those under way that are none of them."""
        self._collect()
        wanted: list[T] = []
        ranks = 0
        for found in tries:
            ranks += self._ranks_of(found)
            is_too_many = self._cores is not None and ranks > self._cores
            if len(wanted) == len(self._free) + len(self._under_way) or (wanted and is_too_many):
                break
            wanted.append(found)
        for found in [found for found in self._under_way if found not in wanted]:
            self._drop(found)
        for found in wanted:
            if found not in self._under_way and found not in self._results:
                self._start(found)

    def result(self, wanted: T) -> A:
        """What a try came to, which is begun now if it was not before. Raises what it raises."""
        if wanted not in self._under_way and wanted not in self._results:
            self.begin(iter([wanted]))
        try_ = self._under_way.get(wanted)
        return (try_.result if try_ else self._results[wanted]).result()

    def close(self) -> None:
        """End what is under way."""
        for try_ in self._under_way.values():
            try_.session.end()
        for try_ in self._under_way.values():
            try_.thread.join()
        self._under_way.clear()

    def drop_all(self) -> None:
        """End what is under way and was not asked for, so that sessions are free for others."""
        for found in list(self._under_way):
            self._drop(found)

    def _collect(self) -> None:
        """Keep the results of what has ended."""
        for found, try_ in list(self._under_way.items()):
            if try_.result.done():
                try_.thread.join()
                self._results[found] = try_.result
                self._free.append(self._under_way.pop(found).session)

    def _start(self, wanted: T) -> None:
        session, result = self._free.pop(0), Future[A]()

        def work() -> None:
            try:
                result.set_result(self._run(session, wanted))
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=work, daemon=True)
        self._under_way[wanted] = _UnderWay(session, thread, result)
        thread.start()

    def _drop(self, unwanted: T) -> None:
        try_ = self._under_way.pop(unwanted)
        try_.session.abandon()
        try_.thread.join()
        try_.session.resume()
        self._free.append(try_.session)
