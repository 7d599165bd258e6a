"""In a process of ours `harness`, `reference` and `cases` are bitproof's, whatever has these names where Python looks.

A user's other modules are found as ever: the working directory first, then sys.path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from bitproof.harness.program import text_loader
from bitproof.harness.program.text_loader import by_text

NAMES = ("harness", "reference", "cases")
ROOT = Path(__file__).parents[2]


class OwnPackages:
    """A finder of sys.meta_path that knows our packages alone, and finds them where this file lies."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The place of a package or of a module in one, None for any other module."""
        if name.partition(".")[0] not in NAMES:
            return None
        return by_text(PathFinder.find_spec(name, [str(ROOT)] if name in NAMES else path))


def claim() -> None:
    """From now on, let our packages win over others of their names in this process, and run what their files say."""
    if OwnPackages not in sys.meta_path:
        sys.meta_path.insert(0, OwnPackages)
    text_loader.claim()


def search_path() -> list[str]:
    """Where the host and its ranks look for modules: the working directory first, unless Python was told not to."""
    here = [] if sys.flags.safe_path else [""]
    return list(dict.fromkeys(folder or os.getcwd() for folder in (*here, *sys.path)))


def hidden(name: str) -> Path | None:
    """What a user has under the name of one of our packages: a package or a module that our processes never import."""
    for folder in map(Path, search_path()):
        package, module = folder / name, folder / f"{name}.py"
        if os.path.realpath(folder) == os.path.realpath(ROOT):
            continue
        if any(package.glob("*.py")):
            return package
        if module.is_file():
            return module
    return None


def remark() -> str | None:
    """What to say of a user's packages that ours hide; None when there are none."""
    found = [str(path) for name in NAMES if (path := hidden(name))]
    if not found:
        return None
    names = " and ".join(", ".join(found).rsplit(", ", 1))
    return (
        f"bitproof: {names} {'is' if len(found) == 1 else 'are'} not imported: bitproof's own packages, in {ROOT}, are "
        f"named {', '.join(NAMES)}; rename yours where a system, a pass or a case needs it"
    )


def fix_of_clash(module: str | None) -> str | None:
    """How to mend that `module` was looked for in our package, where a user has one of that name; None elsewhere."""
    name = (module or "").partition(".")[0]
    path = hidden(name) if name in NAMES else None
    return None if path is None else f"rename {path}: {name} is bitproof's own package, in {ROOT}"
