"""`harness`, `reference` and `cases` as `bitproof`'s own packages, in a process that is somebody else's.

A process of ours claims these names for good (see `harness.program.own_packages`). Where bitproof is a guest, in a test
suite or a notebook, it loads what it needs when it needs it, and looks for nothing else in its own place.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(name: str) -> None:
    """Make sure that the package `name` is ours. Raises ImportError when another of that name was imported before."""
    loaded = sys.modules.get(name)
    if loaded is None:
        _load(name)
    elif not any(os.path.realpath(path) == str(ROOT.resolve() / name) for path in getattr(loaded, "__path__", ())):
        raise ImportError(
            f"bitproof needs its own package {name}, in {ROOT}, and this process has imported another one: "
            f"{getattr(loaded, '__file__', None) or loaded}; rename that one"
        )


def _load(name: str) -> None:
    """Import a package from our root, which is not put on sys.path: it may hold a whole site-packages."""
    spec = PathFinder.find_spec(name, [str(ROOT)])
    if spec is None or spec.loader is None:
        raise ImportError(f"bitproof lacks its own package {name}, in {ROOT}; install it anew")
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[name]
        raise
