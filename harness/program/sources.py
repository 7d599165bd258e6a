"""What this process is made of: the files that decide what a traced graph looks like, as they were when it started.

`note` is called before anything of ours, or of torch, is imported. Files that are still untouched when a graph is
finished are then those that were imported, however long that took and whoever edits them meanwhile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.program.own_packages import ROOT

OWN = ("harness", "reference")
"""Our packages that graphs are made by. A case is data, whoever made it."""

Stat = tuple[str, int, int, int, int]
"""A file's path, inode, bytes, and when its content and its inode changed last, in nanoseconds."""


@dataclass(frozen=True)
class Sources:
    """`digest` names every byte of our packages, and torch's files by place, size and time: those are 60 MB.

    `own` names our packages' alone, wherever they lie: it is equal on machines that have one release.
    """

    digest: str
    stats: tuple[Stat, ...] = field(repr=False)
    own: str = ""

    def are_untouched(self) -> bool:
        """Whether every file is still what it was, by its content (ours), size and times (all)."""
        return read_sources() == self


@dataclass(frozen=True)
class Installation:
    """What this process is made of. `others` names the files of modules that are neither ours nor torch's."""

    sources: Sources
    others: str


_at_start: tuple[float, Sources] | None = None


def note(loaded: Iterable[str] | None = None) -> None:
    """Look at the sources: once, before anything that they hold is imported. 50 ms.

    A process that has `loaded` some of it, such as one that put something else in its place, vouches for nothing.
    """
    global _at_start
    known = ("harness", "harness.program", "harness.program.own_packages", "harness.program.sources")
    if not any(name.partition(".")[0] in (*OWN, "torch") and name not in known for name in loaded or sys.modules):
        _at_start = time.time(), read_sources()


def installation() -> Installation | None:
    """What this process is made of, with all that is loaded by now; None where that cannot be vouched for.

    That is where nobody looked before the first import, and where a file that is loaded changed since then.
    """
    if _at_start is None:
        return None
    began, sources = _at_start
    known = {stat[0] for stat in sources.stats}
    files = {
        file
        for module in list(sys.modules.values())
        if isinstance(file := getattr(module, "__file__", None), str) and file not in known
    }
    stats = [stat_of(file) for file in sorted(files) if os.path.isfile(file)]
    if any(max(stat[3:]) >= began * 1e9 for stat in stats):
        return None
    return Installation(sources, hashlib.sha256(repr(stats).encode()).hexdigest())


def read_sources() -> Sources:
    """The files as they are now."""
    told, stats = hashlib.sha256(), []
    for package in OWN:
        for stat in sorted(_files(str(ROOT / package))):
            content = Path(stat[0]).read_bytes()
            told.update(f"{os.path.relpath(stat[0], ROOT)}\0{len(content)}\0".encode() + content)
            stats.append(stat)
    own = told.hexdigest()
    found = importlib.util.find_spec("torch")
    for stat in sorted(_files(os.path.dirname(found.origin), (".py", ".so"))) if found and found.origin else ():
        told.update(f"{stat}\0".encode())
        stats.append(stat)
    return Sources(told.hexdigest(), tuple(stats), own)


def own_digest() -> str:
    """The sha256 of our packages' content, as this process imported it; as it is now where nobody looked before."""
    return _at_start[1].own if _at_start is not None else read_sources().own


def stat_of(file: str) -> Stat:
    """What tells that a file is the one that it was."""
    told = os.stat(file)
    return file, told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns


def _files(folder: str, endings: tuple[str, ...] = ("",)) -> Iterator[Stat]:
    """Every file below a folder that ends so, compiled Python left out."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path, endings)
            elif entry.name.endswith(endings) or ".so." in entry.name:
                yield stat_of(entry.path)
