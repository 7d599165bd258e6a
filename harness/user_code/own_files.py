"""Find the files in a user's folder that a file imports, without running any of them."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from importlib.util import decode_source
from pathlib import Path

from bitproof.harness.files.plain_files import read_plain

_INSTALLED = {"site-packages", "dist-packages"}


def package_of(path: Path) -> tuple[Path, str]:
    """Return the folder in which a file's imports are searched for, and the name of the file's package; "" if it has
    none.

    For `src/pkg/sub/t.py`, with an `__init__.py` in `pkg` and `sub`: (`src`, "pkg.sub").
    """
    folder, names = path.parent, []
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def imported_beside(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports, directly or through other files in its folder.

    A file that is not valid Python adds no names. Its error is raised later, when it runs.
    """
    root, names = package_of(path.resolve())[0], set()
    seen, pending = set(), [path.resolve()]
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        # For code that is nested too deeply, Python's parser raises RecursionError or MemoryError.
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            for module in imports_of(decode_source(read_plain(file)), package_of(file)[1]):
                names.add(module.partition(".")[0])
                pending += files_of(root, module)
    return names


def imports_of(text: str, package: str) -> Iterator[str]:
    """Yield the dotted name of each import in `text`, the source of a file in `package`.

    For `from a import b`, this is "a.b", a module or an object in a module.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One leading dot means the file's own package, each further dot a package above.
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)


def files_of(root: Path, module: str) -> Iterator[Path]:
    """Yield the files below `root` that run when a module is imported.

    These are the `__init__.py` of each package that contains it, and then the module's own file.
    """
    folder = root
    for part in module.split("."):
        # A package has precedence over a module of the same name, as in Python.
        for file in (folder / part / "__init__.py", folder / f"{part}.py"):
            if file.is_file() and not _INSTALLED.intersection(file.parts):
                yield file
                break
        folder /= part
