"""Detect that an import would get another module than intended: one of the same name, loaded from another folder.

Python returns a loaded module for every import of its name. If files in two folders both `import util`, both get the
first file's `util`. Then the second file is refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from bitproof.harness.errors import UsageError
from bitproof.harness.runtime import sources
from bitproof.harness.user_code.own_files import imported_beside

_OURS = "bitproof"


class ModulePlace(NamedTuple):
    """A module's file ("" for a namespace package), and the folders in which its submodules are searched."""

    file: str
    folders: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.file or ", ".join(self.folders)


def place_of(module: ModuleType | None) -> ModulePlace | None:
    """Return the file and folders of a loaded module; None if it has neither, such as a built-in module."""
    return _place(getattr(module, "__spec__", None))


def place_if_unloaded(name: str) -> ModulePlace | None:
    """Return the file and folders that importing `name` would find if no such module were loaded; None if it finds
    none."""
    # A submodule is searched for in the folders of its loaded package, any other module on `sys.path`.
    parent, path = name.rpartition(".")[0], None
    if parent:
        path = getattr(sys.modules.get(parent), "__path__", None)
        if path is None:
            return None
    known = {*sys.path_importer_cache}
    try:
        for finder in list(sys.meta_path):
            try:
                spec = finder.find_spec(name, path)
            except Exception:
                # A finder of another package may fail at names that are not its own.
                continue
            if spec is not None:
                return _place(spec)
    finally:
        # Python remembers which folder "src" is from the first look at it; that must be the user's, not ours.
        for entry in {*sys.path_importer_cache} - known:
            sys.path_importer_cache.pop(entry, None)
    return None


def check_own_modules(path: Path, root: Path) -> None:
    """Raise UsageError if a file would import another module than intended, because one of the same name is loaded.

    For example, the file imports `util` and means `new/util.py`, but `old/util.py` is loaded. `root` is the folder in
    which the file's modules are searched for.
    """
    loaded = {name.partition(".")[0] for name in sys.modules} - sources.loaded_at_start - {_OURS}
    beside = {entry.name.partition(".")[0] for entry in os.scandir(root)} if root.is_dir() else set()
    for name in sorted(loaded & beside):
        has, finds = place_of(sys.modules.get(name)), place_if_unloaded(name)
        # The imports of the file are read last, as this takes longest.
        if has is None or finds is None or has == finds or name not in imported_beside(path):
            continue
        raise UsageError(
            f"{path} imports {name}, and this process has another module of that name",
            expected=f"{finds}, which lies beside it",
            found=f"{has}, loaded before",
            fix=f"rename {name}, or make the folder a package (an empty __init__.py) and import it from there",
        )


def _place(spec: object) -> ModulePlace | None:
    locations = getattr(spec, "submodule_search_locations", None)
    folders = tuple(os.path.abspath(folder) for folder in locations) if locations is not None else ()
    origin = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else None
    return ModulePlace(os.path.abspath(origin) if origin else "", folders) if origin or folders else None
