"""Run work in a separate process, so that the command line's own process need not import torch.

That process reads its task from a pipe and writes answers into another pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bitproof.harness.processes import framing
from bitproof.harness.processes.channel import send
from bitproof.harness.processes.started import Started

A = TypeVar("A")


@dataclass(frozen=True)
class Lost:
    """Takes the place of an answer that did not arrive, because its process ended or was too slow. `reason` says
    which."""

    reason: str


def answers_from_subprocess(
    module: str, task: Any, answer: type[A], count: int, log: Path, timeout: float
) -> Generator[A | Lost]:
    """Run a module in a separate process, and yield its `count` answers to `task`, each of type `answer`.

    If the process ends, or an answer takes longer than `timeout` seconds, all remaining answers are `Lost`. Closing the
    iterator ends the process. Its output goes to the file `log`.
    """
    process = Started(module, (), log=log)
    lost = None
    try:
        try:
            process.send(task)
        except OSError:
            lost = "its process ended"
        # There is a single task: the process ends after its answers.
        process.close_requests()
        for _ in range(count):
            line = None
            if lost is None:
                line = process.inlet.wait(None if timeout == float("inf") else timeout)
            if line is None:
                # The first reason stays: all later answers are lost for the same reason.
                ended = "its process ended" if process.inlet.is_over else f"it took longer than {timeout:g} s"
                lost = lost or ended
                yield Lost(f"{lost}: see logs/{log.name}")
            else:
                yield framing.read(line, answer)
    finally:
        process.kill()


def answer_all(task_type: type[A], answers: Callable[[A], Iterator[Any]]) -> None:
    """Read a task, call `answers` with it, and write each answer at once. For a module that `answers_from_subprocess`
    runs.

    The task is read from standard input. The first argument of the process is the descriptor of the pipe for answers.
    """
    task: A = framing.read(sys.stdin.buffer.readline(), task_type)
    for found in answers(task):
        send(int(sys.argv[1]), found)
