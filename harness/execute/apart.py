"""Work in a process of its own, which loads torch in place of the command line's: a line in, a line an answer.

It is handed its task on its standard input and answers on a pipe; what it prints goes to a log. A process that dies, or
is late, keeps nothing else from going on: what is still to be answered is then told as lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bitproof.harness.execute import wire

_START = str(Path(__file__).parents[1] / "program" / "start.py")

A = TypeVar("A")


@dataclass(frozen=True)
class Lost:
    """Stands for an answer that never came, and says why."""

    reason: str


def answers_apart(
    module: str, task: Any, answer: type[A], count: int, log: Path, timeout: float
) -> Generator[A | Lost]:
    """`count` answers of what a module's `main` makes of a task, each within `timeout` seconds.

    After one that is not in time, later ones are lost too. Closing the iterator ends the process.
    """
    reader, writer = os.pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", _START, module, str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # an interrupt reaches us alone, and we end it
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        with contextlib.suppress(BrokenPipeError):
            _hand_over(process, task)
        received, lost = b"", None
        for _ in range(count):
            deadline = time.monotonic() + timeout
            while lost is None and b"\n" not in received:
                left = None if timeout == float("inf") else max(0.0, deadline - time.monotonic())
                readable, _, _ = select.select([reader], [], [], left)
                content = os.read(reader, 1 << 16) if readable else b""
                if not content:
                    lost = "its process ended" if readable else f"it took longer than {timeout:g} s"
                received += content
            if lost is not None:
                yield Lost(f"{lost}: see logs/{log.name}")
                continue
            line, _, received = received.partition(b"\n")
            yield wire.read(line, answer)
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def _hand_over(process: subprocess.Popen[bytes], task: Any) -> None:
    assert process.stdin is not None
    with process.stdin as stream:
        stream.write(wire.write(task))


def answer_all(task_type: type[A], answers: Callable[[A], Iterator[Any]]) -> None:
    """The other end: `MODULE PIPE` reads its task, and writes each answer as it comes."""
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as pipe:
        task: A = wire.read(sys.stdin.buffer.readline(), task_type)
        for found in answers(task):
            pipe.write(wire.write(found))
