"""Import the modules of a case's `preload` once, in the process from which its ranks are forked.

A framework may take ten seconds to import, and each of a case's four runs would otherwise import it again. The
importing process serves only runs that preload the same modules from the same folder. A module that starts threads or
touches a GPU is refused, because a process that is forked afterwards may hang.

A rank is refused if an import would find another file than the preloaded one. For example, `pkg` was preloaded, then
the system calls `sys.path.insert(0, "vendored")`, and there is a folder `vendored/pkg/`.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bitproof.harness.errors import UsageError
from bitproof.harness.machine.gpus import has_started_driver
from bitproof.harness.user_code.missing import missing_package
from bitproof.harness.user_code.user_file import find_beside, loading
from bitproof.harness.user_code.whose import ModulePlace, place_if_unloaded, place_of
from bitproof.harness.within_user_code import refusing

_preloaded: Preloaded | None = None


class Preloaded:
    """The preloaded modules of this process and their files, to check that imports still find these files.

    The check runs before an import in user code, if `sys.path`, the import finders or the working directory have
    changed.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._places = {name: place for name in names if (place := place_of(sys.modules[name])) is not None}
        self._problem: UsageError | None = None
        self._looked_in = _where_imports_look()
        self.check()

    def check(self) -> None:
        """Raise UsageError if an import of a preloaded module would now find another file.

        Once this has happened, each later call raises the same error.
        """
        # The error is kept, as user code may catch it where it imports.
        self._looked_in = _where_imports_look()
        if self._problem is None:
            for name, place in self._places.items():
                now = place_if_unloaded(name)
                # None: the module cannot be found now, so an import would use the loaded module.
                if now is not None and now != place:
                    self._problem = _moved(name, place, now)
                    break
        if self._problem is not None:
            raise self._problem

    @refusing()
    def check_again(self) -> None:
        if self._looked_in != _where_imports_look():
            self.check()


def preload_watched(modules: Sequence[str], folder: Path | None = None) -> None:
    """Preload modules, then refuse every import that would find another file for one of them, with a UsageError.

    Processes that are forked from this process also refuse such imports. Raises the errors of `preload`.
    """
    global _preloaded
    # Patch before the first import: a module may keep such a function, as `from importlib.util import find_spec` does.
    for place, name in _IMPORTING:
        setattr(place, name, _checking(getattr(place, name)))
    _preloaded = preload(modules, folder)


_IMPORTING: tuple[tuple[Any, str], ...] = (
    (builtins, "__import__"),
    # import_module calls this one, so a module that kept import_module is watched as well
    (sys.modules["importlib._bootstrap"], "_gcd_import"),
    (importlib.util, "find_spec"),
)
"""The functions of Python's import system that return a loaded module or its file for a name, with their modules."""


def _checking(imports: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(imports)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _preloaded is not None:
            _preloaded.check_again()
        return imports(*args, **kwargs)

    return checked


def preload(modules: Sequence[str], folder: Path | None = None) -> Preloaded:
    """Import these modules, with `folder` first on the search path.

    Raises UsageError if an import fails, starts a thread or touches a GPU.
    """
    if folder is not None:
        find_beside(folder)
    # Modules that a preloaded module imports are preloaded with it, so they are checked, too.
    before = set(sys.modules)
    for name in modules:
        if name not in sys.modules:
            _import(name)
    # The packages around a module were imported with it.
    named = {".".join(name.split(".")[: end + 1]) for name in modules for end in range(name.count(".") + 1)}
    return Preloaded(sorted((set(sys.modules) - before) | (named & set(sys.modules))))


def check_preloaded() -> None:
    if _preloaded is not None:
        _preloaded.check()


def _where_imports_look() -> tuple[object, ...]:
    try:
        here = os.getcwd()  # for entries such as "" and "src"
    except OSError:
        here = ""
    # Finders and hooks by identity: a changed finder may find other files for the same path.
    return (here, *sys.path, *map(id, sys.meta_path), *map(id, sys.path_hooks))


def _moved(name: str, place: ModulePlace, now: ModulePlace) -> UsageError:
    return UsageError(
        f"the preloaded module {name} is not the one that the system imports",
        expected=f"{place}, as when it was preloaded",
        found=f"{now}, where sys.path leads by now",
        fix="leave it out of `preload`: each rank then imports it by itself",
    )


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
    # A forked process has only the thread that forked. Locks that other threads hold at that moment stay locked there.
    started = _num_threads() - before
    if started > 0 or has_started_driver():
        raise UsageError(
            f"the preloaded module {name} leaves a process that cannot be forked safely",
            expected="a module that starts no thread and touches no GPU as it is imported",
            found=f"{started} new threads" if started > 0 else "CUDA's driver, started",
            fix="leave it out of `preload`: each rank then imports it by itself",
        )


def _num_threads() -> int:
    try:
        # Also counts threads that C++ code started, unlike `threading`.
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
