"""Run a program that is not part of bitproof, with a time limit: a compiler, git, or another Python."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Ran(NamedTuple):
    """The result of a program: its exit status, standard output and standard error."""

    status: int
    out: str
    err: str


class CommandError(Exception):
    """A program could not be started, or did not finish in time. The error's text says which."""


def run_command(
    command: Sequence[str],
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    is_joined: bool = False,
    given: str | None = None,
) -> Ran:
    """Run a program and return its status and output. Raises CommandError if it cannot be started, or runs too long.

    - `seconds`: the time limit.
    - `environment`, `folder`: its environment and working directory; None for those of this process.
    - `given`: its standard input, empty by default.
    - `is_joined`: whether standard error is part of the output.
    """
    stdin = {"stdin": subprocess.DEVNULL} if given is None else {"input": given}
    try:
        done = subprocess.run(
            list(command),
            **stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if is_joined else subprocess.PIPE,
            timeout=seconds,
            env=environment,
            cwd=folder,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"not finished after {seconds:g} s") from None
    except OSError as error:
        raise CommandError(str(error)) from error
    return Ran(done.returncode, done.stdout, done.stderr or "")
