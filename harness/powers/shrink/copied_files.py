"""Collects the files of a user's systems, so that they can be written into another folder. No code is run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import decode_source
from pathlib import Path
from typing import NamedTuple

from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.user_code.own_files import files_of, imports_of, package_of


class OwnFiles(NamedTuple):
    """A user's files, to be written into another folder.

    - `texts`: path -> content. Paths start at the folder where the files' imports start, so that the imports work.
    - `names`: requested source -> its new location, as `FILE.py:NAME`.
    - `needs`: packages that the files import, each with its version.
    """

    texts: dict[str, str]
    names: dict[str, str]
    needs: list[str]


def own_files(sources: Mapping[str, Path]) -> OwnFiles:
    """Collect a user's files, and all files that they import from the same folders.

    `sources` maps `FILE.py:NAME` to a path. Data files are not collected. Raises OSError or SyntaxError for a file that
    is not readable Python.
    """
    roots: dict[Path, str] = {}
    texts: dict[str, str] = {}
    names: dict[str, str] = {}
    imported: set[str] = set()
    for source, given in sources.items():
        path = given.resolve()
        root, _ = package_of(path)
        # Each further root gets a numbered folder, so that names of files cannot clash.
        folder = roots.setdefault(root, f"{len(roots)}/" if roots else "")
        names[source] = f"{folder}{path.relative_to(root)}:{source.rpartition(':')[2]}"
        # The file, then all files of the same root that it imports, directly or through others.
        pending = [path]
        while pending:
            file = pending.pop()
            name = f"{folder}{file.relative_to(root)}"
            if name in texts:
                continue
            texts[name] = decode_source(read_plain(file))
            for module in imports_of(texts[name], package_of(file)[1]):
                found = list(files_of(root, module))
                pending += found
                # A module that is no file here comes from an installed package, or from Python itself.
                imported |= set() if found else {module.partition(".")[0]}
    return OwnFiles(texts, names, _distributions(imported))


def _distributions(modules: set[str]) -> list[str]:
    from importlib.metadata import packages_distributions, version

    known = packages_distributions()
    found = {name for module in modules - set(sys.stdlib_module_names) for name in known.get(module, ())}
    return [f"{name} {version(name)}" for name in sorted(found)]
