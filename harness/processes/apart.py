"""Runs work in a separate process, so that the command line's process need not import torch.

The process gets its task from a pipe and writes answers into another. Answers that do not arrive in time are lost.
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
    """Stands for an answer that never came; `reason` says why."""

    reason: str


def answers_apart(
    module: str, task: Any, answer: type[A], count: int, log: Path, timeout: float
) -> Generator[A | Lost]:
    """Start a module with a task in a separate process, and yield `count` answers. Closing the iterator ends the
    process.

    If the process ends, or an answer takes longer than `timeout` seconds, all remaining answers are `Lost`.
    """
    process = Started(module, (), log=log)
    lost = None
    try:
        try:
            process.tell(task)
        except OSError:
            lost = "its process ended"
        # There is a single task: the process ends after its answers.
        process.hang_up()
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
    """The `main` of a module that `answers_apart` starts as `MODULE PIPE`.

    Reads the task from standard input, and writes each of its answers into the pipe at once.
    """
    task: A = framing.read(sys.stdin.buffer.readline(), task_type)
    for found in answers(task):
        send(int(sys.argv[1]), found)
