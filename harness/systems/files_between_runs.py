"""Refuse a script that reads a file from an earlier run of the same comparison: its runs began differently.

    reference    tokens.pt does not exist: tokenizes, and writes it
    candidate    torch.load("tokens.pt")                               refused

All runs have the user's working directory. A file that was written after the first run of the command began, and before
this run began, is from another run. Python's own bytecode and torch's caches of compiled code are not input.

Each file that Python opens is checked, in workers of a DataLoader, too. Not checked are files that a library opens in
its own code, such as those of safetensors and Arrow, files that another program reads for the script, and a script that
only tests whether a file exists.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

from bitproof.harness.errors import UsageError
from bitproof.harness.within_user_code import refused

_FIRST = "first-script-run"
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def refuse_files_of_earlier_runs(script: str, work: Path) -> None:
    """From now on, opening such a file raises UsageError. `work` is the run's name in the command's own folder."""
    earlier, began = _stamp(work.parent / _FIRST), _stamp(work.with_suffix(".script-run"))
    caches = [os.environ[name] for name in _CACHES if name in os.environ]
    ours = tuple(f"{folder}{os.sep}" for folder in (work.parent.resolve(), *caches))

    def opened(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not _is_read(*args[1:3]) or not isinstance(args[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(args[0])
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return
        is_others = earlier <= found.st_mtime_ns < began and stat.S_ISREG(found.st_mode)
        if is_others and not path.endswith(".pyc") and not os.path.realpath(path).startswith(ours):
            raise refused(_refusal(script, path))

    sys.addaudithook(opened)


def _is_read(mode: str | None, flags: int) -> bool:
    if mode is not None:
        return "r" in mode or "+" in mode
    return flags & os.O_ACCMODE != os.O_WRONLY


def _stamp(path: Path) -> int:
    """The creation time of this file in nanoseconds: the first rank creates it now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
    return path.stat().st_mtime_ns


def _refusal(script: str, path: str) -> UsageError:
    return UsageError(
        f"the script {script} reads {path}, which an earlier run of this comparison wrote",
        expected="runs that begin with the same files: each side runs twice, in one working directory",
        fix="run the command again if the file is input, such as a download; else let the script write it elsewhere",
    )
