"""Find a user's file and all files that it imports from beside it, without running any."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Mapping
from importlib.util import decode_source
from pathlib import Path
from typing import NamedTuple

from bitproof.harness.files.plain_files import read_plain

_INSTALLED = {"site-packages", "dist-packages"}


class OwnFiles(NamedTuple):
    """The files of a user's code, to be written elsewhere.

    `texts` maps a path to the text to write there. Files keep their places below the folder that their imports start
    from, so the imports still find them. `names` has the new location of each requested source, as `FILE.py:NAME`, and
    `needs` the distributions that all files import, each with its version.
    """

    texts: dict[str, str]
    names: dict[str, str]
    needs: list[str]


def package_of(path: Path) -> tuple[Path, str]:
    """The folder that is searched for a file's modules, and the name of its package there; "" for a file in no
    package.
    """
    folder, names = path.parent, []
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def imported_beside(path: Path) -> set[str]:
    """The first parts of all names that a file imports, anywhere in it or in files of its folder that it imports. A
    file that is not valid Python has no imports here: running it reports the error."""
    root, names = package_of(path.resolve())[0], set()
    seen, pending = set(), [path.resolve()]
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            for module in _imports(decode_source(read_plain(file)), package_of(file)[1]):
                names.add(module.partition(".")[0])
                pending += _files_of(root, module)
    return names


def own_files(sources: Mapping[str, Path]) -> OwnFiles:
    """Collect a user's files, and all files that they import from their own folders.

    `sources` maps `FILE.py:NAME` to the file. Imports of names computed at run time are left out, and so are data
    files. Raises OSError and SyntaxError for files that cannot be read as Python.
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
        pending = [path]
        while pending:
            file = pending.pop()
            name = f"{folder}{file.relative_to(root)}"
            if name in texts:
                continue
            texts[name] = decode_source(read_plain(file))
            for module in _imports(texts[name], package_of(file)[1]):
                found = list(_files_of(root, module))
                pending += found
                imported |= set() if found else {module.partition(".")[0]}
    return OwnFiles(texts, names, _distributions(imported))


def _imports(text: str, package: str) -> Iterator[str]:
    """Yield the dotted names that a file of this package imports, anywhere: each may be a module or a name in
    a module.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One leading dot means the file's own package, each further dot a package above.
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)


def _files_of(root: Path, module: str) -> Iterator[Path]:
    """Yield the files below the root that an import of a module runs: its packages' and its own."""
    folder = root
    for part in module.split("."):
        for file in (folder / part / "__init__.py", folder / f"{part}.py"):
            if file.is_file() and not _INSTALLED.intersection(file.parts):
                yield file
                break
        folder /= part


def _distributions(modules: set[str]) -> list[str]:
    from importlib.metadata import packages_distributions, version

    known = packages_distributions()
    found = {name for module in modules - set(sys.stdlib_module_names) for name in known.get(module, ())}
    return [f"{name} {version(name)}" for name in sorted(found)]
