"""Modules of others that a case wants imported once, in the process that all ranks are forked from.

A framework may take ten seconds to import, and each of a case's four runs would do so. What is imported here stays, for
later cases of this process, too. A module that starts threads, or touches a GPU, is refused: a process that is forked
then may hang.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from bitproof.harness.errors import UsageError
from bitproof.harness.machine.gpus import has_started_driver
from bitproof.harness.user_code.missing import missing_package
from bitproof.harness.user_code.user_file import loading


def preload(modules: Sequence[str]) -> None:
    """Import these modules once. Raises UsageError if an import fails, starts a thread or touches a GPU."""
    for name in modules:
        if name not in sys.modules:
            _import(name)


def _import(name: str) -> None:
    before = _num_threads()
    try:
        with loading(name):
            importlib.import_module(name)
    except Exception as error:
        raise (
            missing_package(error, f"the preloaded module {name}")
            or UsageError(
                f"the preloaded module {name} cannot be imported",
                found=f"{type(error).__name__}: {error}",
                fix="mend it, or leave it out of `preload`",
            )
        ) from error
    started = _num_threads() - before
    if started > 0 or has_started_driver():
        raise UsageError(
            f"the preloaded module {name} leaves a process that cannot be forked safely",
            expected="a module that starts no thread and touches no GPU as it is imported",
            found=f"{started} new threads" if started > 0 else "CUDA's driver, started",
            fix="leave it out of `preload`: each rank then imports it by itself",
        )


def _num_threads() -> int:
    """The threads of this process; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
