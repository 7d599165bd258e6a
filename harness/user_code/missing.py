"""Explain that a user's code imports a package which is not installed."""

from __future__ import annotations

import importlib.util
import sys

from bitproof.harness.errors import UsageError


def missing_package(error: BaseException, what: str, asked_for: str = "") -> UsageError | None:
    """Return an error for code that imports a missing package; None if `error` has another cause.

    - `what`: a name of the code, for the error.
    - `asked_for`: the module that the user named, if any. If that module is missing, the result is None.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    # The module that the user named is missing itself: the caller has a better error for that.
    if asked_for == error.name or asked_for.startswith(error.name + "."):
        return None
    package = error.name.partition(".")[0]
    # The package is there, so another of its versions is meant.
    if package != error.name and importlib.util.find_spec(package) is not None:
        return UsageError(
            f"{what} imports {error.name}, which the installed {package} does not have",
            expected=f"a version of {package} with that module",
            found=f"{type(error).__name__}: {error}",
            fix=f"install that version of {package} for {sys.executable}",
        )
    return UsageError(
        f"{what} imports {error.name}, which is not installed",
        expected=f"{package} installed for {sys.executable}",
        found=f"{type(error).__name__}: {error}",
        fix=f"{sys.executable} -m pip install {package}, or the distribution that brings it; where it is a module of "
        "your own, run from the folder that holds it",
    )
