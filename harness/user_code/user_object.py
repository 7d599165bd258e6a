"""Name a function or class by its file, as in `t.py:make`, so that ranks, which are other processes, can load it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

from bitproof.harness.errors import UsageError

WAY_OUT = "write it as a function or a class of a file, at the file's top level, and hand that over"


def source_of(given: Any) -> str:
    """Return the text `FILE.py:NAME`, from which ranks load a function or class. Raises UsageError if they could not
    find it.

    The path is relative if the file is below the working directory, else absolute.
    """
    if not isinstance(given, (FunctionType, type)):
        raise _refused(f"an object of type {type(given).__name__}", "it is made while the caller runs")
    name = given.__qualname__
    if "<lambda>" in name:
        raise _refused("a lambda", "it has no name")
    if "<locals>" in name:
        raise _refused(f"{name}, which is made inside of a function", "what it holds of that call is nowhere else")
    module = sys.modules.get(given.__module__)
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        raise _refused(f"{name} of {given.__module__}", "it was not read from a Python file")
    # A decorator or a later definition may have replaced the object under its name.
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not given:
        raise _refused(f"{name} of {file}", "in that file the name stands for something else")
    # A relative path, so that a report names the same file on another machine.
    path = os.path.realpath(file)
    here = os.path.relpath(path)
    return f"{path if here.startswith(os.pardir) else here}:{name}"


def _refused(found: str, why: str) -> UsageError:
    return UsageError(
        f"a system was given that no rank can find again: {why}",
        expected="a function or class by its file and name, or a text such as FILE.py:factory",
        found=found,
        fix=WAY_OUT,
    )
