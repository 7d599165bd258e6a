"""Find the file of a source line in a recording, to print a path that opens from the working directory.

A recording keeps the last three parts of a path: `exp/new/train.py:14`. This line is shown as

    new/train.py:14                          if the file is below the working directory
    /home/me/exp/new/train.py:14             if it is elsewhere on this machine
    transformers/models/bert/bert.py:14      in an installed package: relative to site-packages or dist-packages
    exp/new/train.py:14                      if it is not on this machine, as in a report from another machine
"""

from __future__ import annotations

import functools
import glob
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

LINE = re.compile(r"(?P<path>[^\s:()'\"]*[^\s:()'\"/]\.py):(?P<line>[1-9]\d{0,8})\b")
_PACKAGES = {"site-packages", "dist-packages"}
_MAX_DEPTH = 4


def shown_line(source: str | None) -> str:
    """Return a call's source line in a form that terminals and editors open; "" for a call without a source line."""
    if not source or not (found := LINE.fullmatch(source)) or (file := file_of(found["path"])) is None:
        return source or ""
    here = Path.cwd()
    for top in (here, *(each for each in _entries() if each.name in _PACKAGES)):
        if file.is_relative_to(top):
            return f"{file.relative_to(top)}:{found['line']}"
    return f"{file}:{found['line']}"


def with_shown_lines(text: str) -> str:
    """Replace each source line in a text as `shown_line` does: `mm of head (exp/new/gpt.py:69)` becomes `mm of head
    (gpt.py:69)`.
    """
    return LINE.sub(lambda found: shown_line(found[0]), text)


def file_of(path: str) -> Path | None:
    """Return the nearest file on this machine whose path ends with `path`; None if there is none, or if several are
    equally near.
    """
    # The path comes from a recording, and must not lead to other files.
    parts = PurePosixPath(path).parts
    if ".." in parts:
        return None
    return _file_below(str(PurePosixPath(path)), os.getcwd())


# `here` is an argument for the cache: after a change of the working directory, other files are the nearest.
@functools.cache
def _file_below(path: str, here: str) -> Path | None:
    if os.path.isabs(path):
        return Path(path) if os.path.isfile(path) else None
    for files in _places(path, Path(here)):
        found = {file.absolute() for file in files if file.is_file()}
        # Several files are equally near: any choice might be wrong.
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _places(path: str, here: Path) -> Iterator[list[Path]]:
    # Above the working directory, then below it, then among installed packages. Folders below are searched only a few
    # levels deep, since a tree may have millions of files.
    yield from ([top / path] for top in (here, *here.parents))
    end = glob.escape(path)
    yield [Path(each) for depth in range(1, _MAX_DEPTH) for each in glob.iglob(f"{here}/{'*/' * depth}{end}")]
    yield [top / path for top in _entries()]
    yield [Path(each) for top in _entries() if top.name in _PACKAGES for each in top.glob(f"*/{end}")]


def _entries() -> list[Path]:
    return [Path(each) for each in sys.path if each]
