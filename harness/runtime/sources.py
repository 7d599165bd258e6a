"""The files that decide a traced graph, as they were when this process started.

`note` must be called before any import of bitproof or torch. If a file has not changed since then, it is the file that
was imported.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from bitproof.harness.runtime import text_loader

ROOT = Path(__file__).parents[2]
"""The package bitproof."""

OWN = ("harness", "reference")
"""The packages of bitproof whose code makes graphs. `cases` is not among them: a case is data."""

_FIRST = ("text_loader", "sources")
"""Modules of `harness.runtime` that are loaded before `note` runs."""
_IN_MEMORY = ("/dev/", "/memfd:", "/anon")
_OURS = ("__main__", "bitproof")
_CODE, _HEADERS = (".py", ".so"), "include"
"""The suffixes of the torch files that are checked. `_HEADERS` is a folder with 9,000 files, which are checked only if
they are loaded."""

Stat = tuple[str, int, int, int, int]
"""A file's path, inode, size in bytes, and the times at which its content and its inode were last changed, in
nanoseconds."""


@dataclass(frozen=True)
class Sources:
    """The files of bitproof's packages and of torch.

    - `digest`: a hash of the content of bitproof's files, and of path, size and times of torch's files.
    - `own`: a hash of the content of bitproof's files alone. It is equal on all machines with the same release.
    - `stats`: the size and times of each file.
    """

    digest: str
    stats: tuple[Stat, ...] = field(repr=False)
    own: str = ""

    def are_untouched(self) -> bool:
        return read_sources() == self


Absent = tuple[str]
"""Stands in place of a `Stat` for a file that does not exist: its path alone."""


@dataclass(frozen=True)
class Later:
    """The modules that a process loaded after it had computed the key of a cached result.

    - `files`: the path, size and times of each loaded file, or only the path if the file does not exist.
    - `found`: maps each package that was searched for to its path; None if it was missing.
    """

    files: tuple[Stat | Absent, ...] = ()
    found: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Later:
        """Make this object from JSON values. Raises KeyError, TypeError or ValueError if they have another form."""
        return cls(tuple(cast(Stat, tuple(file)) for file in values["files"]), dict(values["found"]))

    def would_load_again(self) -> bool:
        return all(_stat(stat[0]) == stat for stat in self.files) and all(
            place_of(name) == place for name, place in self.found.items()
        )


@dataclass(frozen=True)
class Installation:
    """The code that this process runs. `others` is a digest of all loaded files outside of `sources`.

    If Python itself loaded a module, `others` includes both its source and its bytecode: the import used either.
    """

    sources: Sources
    others: str
    loaded: frozenset[str] = field(default=frozenset(), repr=False)
    """The files that `others` includes."""

    def later(self) -> Later | None:
        """Return the modules loaded since this object was made; None if they are unknown, as files have changed."""
        if at_start is None or not self.sources.are_untouched():
            return None
        files = _loaded_files() - self.loaded - {stat[0] for stat in self.sources.stats}
        stats = _stats_since(files, at_start[0])
        # Only top-level packages are searched on the path; their modules are found within them.
        names = {name for name, module in list(sys.modules.items()) if "." not in name and _origin(module) in files}
        # A package that was missing counts too: if it is installed later, the same code would load it.
        found = {name: place_of(name) for name in sorted(names | text_loader.not_found)}
        return None if stats is None else Later(stats, found)


at_start: tuple[float, Sources] | None = None

loaded_at_start: frozenset[str] = frozenset()
"""Modules that a process had loaded before any module of bitproof: Python's own, and those of its startup files."""


def note(loaded: Iterable[str] | None = None) -> None:
    """Read the files of bitproof and of torch, before any of them is imported. This takes 50 ms.

    `loaded` has the names of modules that are imported already; by default, those in `sys.modules`. If some of these
    files are among them, nothing is read, and the code of this process stays unknown.
    """
    global at_start, loaded_at_start
    known = ("bitproof.harness", "bitproof.harness.runtime", *(f"bitproof.harness.runtime.{name}" for name in _FIRST))
    vouched = ("torch", *(f"bitproof.{package}" for package in OWN))
    # With a dot at the end, so that `torchvision` does not count as `torch`.
    if not any(
        f"{name}.".startswith(tuple(f"{x}." for x in vouched)) and name not in known for name in loaded or sys.modules
    ):
        loaded_at_start = frozenset(loaded or sys.modules)
        # The time is read first, so a file that changes while it is read counts as changed.
        at_start = time.time(), read_sources()


def installation() -> Installation | None:
    """Return the code that this process runs, with all modules loaded so far; None if it is unknown.

    It is unknown if `note` was called too late or not at all, or if a loaded file has changed since then.
    """
    if at_start is None:
        return None
    began, sources = at_start
    files = _loaded_files() - {stat[0] for stat in sources.stats}
    stats = _stats_since(files, began)
    if stats is None:
        return None
    return Installation(sources, hashlib.sha256(repr(stats).encode()).hexdigest(), frozenset(files))


def read_sources() -> Sources:
    digest, stats = hashlib.sha256(), []
    for package in OWN:
        for stat in sorted(_files(str(ROOT / package))):
            content = Path(stat[0]).read_bytes()
            # The length separates names from contents: different files cannot give the same bytes.
            digest.update(f"{os.path.relpath(stat[0], ROOT)}\0{len(content)}\0".encode() + content)
            stats.append(stat)
    own = digest.hexdigest()
    found = importlib.util.find_spec("torch")
    # Torch's files count by size and times, since reading them would take too long.
    for stat in sorted(_files(os.path.dirname(found.origin), _CODE, _HEADERS)) if found and found.origin else ():
        digest.update(f"{stat}\0".encode())
        stats.append(stat)
    return Sources(digest.hexdigest(), tuple(stats), own)


def own_digest() -> str:
    """Return the sha256 of the content of bitproof's files, as `note` read them, or as they are now if it did not."""
    return at_start[1].own if at_start is not None else read_sources().own


@functools.cache
def torch_digest() -> str:
    """Return the sha256 of torch's installation: the text of Python files, and the sizes of libraries. Takes 0.2 s.

    Equal installations have the same digest on all machines. Compiled Python files (.pyc) do not count.
    """
    digest, found = hashlib.sha256(), importlib.util.find_spec("torch")
    folder = os.path.dirname(found.origin) if found and found.origin else ""
    for file, _, size, *_ in sorted(_files(folder, _CODE, _HEADERS)) if folder else ():
        digest.update(f"{os.path.relpath(file, folder)}\0{size}\0".encode())
        # Libraries count by their size alone, since they have gigabytes.
        if file.endswith(".py"):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def start_up_code() -> dict[str, str]:
    """Return the sha256 of the code that Python runs at startup, by the name of the module or file.

    This is the code of modules loaded before bitproof, and of .pth files, except for editable installations.
    """
    # Python's version identifies the standard library, so its modules are left out.
    names = {"sitecustomize", "usercustomize", *loaded_at_start} - sys.stdlib_module_names
    loaded = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    found = {
        name: digest
        for name, file in loaded.items()
        if name.partition(".")[0] not in _OURS
        and not name.startswith("__editable__")
        and isinstance(file, str)
        and (digest := digest_of_loaded(file))
    }
    for folder in filter(os.path.isdir, sys.path):
        for entry in os.scandir(folder):
            if entry.name.endswith(".pth") and not entry.name.startswith("__editable__"):
                with contextlib.suppress(OSError):
                    # Python runs the lines of a .pth file that begin with import; all others are paths.
                    lines = [line for line in Path(entry.path).read_bytes().splitlines() if line.startswith(b"import")]
                    if lines:
                        found[entry.name] = hashlib.sha256(b"\n".join(lines)).hexdigest()
    return found


def digest_of_loaded(file: str) -> str | None:
    """Return the sha256 of the text that ran as a module; for any other file, the result of `digest_of_file`."""
    return text_loader.text_digests.get(file) or digest_of_file(file)


@functools.cache
def digest_of_file(file: str) -> str | None:
    """Return the sha256 of a file, or of the archive that contains it; None if it cannot be read. Reads a file once."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except NotADirectoryError:
        return digest_of_file(os.path.dirname(file))
    except OSError:
        return None


def stat_of(file: str) -> Stat:
    """Return a file's path, inode, size and times. If two calls return the same, the file was not changed in
    between."""
    facts = os.stat(file)
    return file, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def runs_its_text() -> bool:
    """Return whether the modules of bitproof in this process were made from the text that their files have now."""
    own = tuple(os.path.join(ROOT, package, "") for package in OWN)
    return all(digest_of_file(file) == ran for file, ran in text_loader.text_digests.items() if file.startswith(own))


def _loaded_files() -> set[str]:
    files = set()
    # A copy: a lazy module may import others as soon as its attributes are read.
    for module in list(sys.modules.values()):
        if (origin := _origin(module)) is not None:
            files.add(origin)
            if module.__spec__ and module.__spec__.cached and origin not in text_loader.text_digests:
                files.add(module.__spec__.cached)
    for folder in filter(os.path.isdir, sys.path):
        # Python runs lines of .pth files at startup, so these files are part of the code.
        files |= {entry.path for entry in os.scandir(folder) if entry.name.endswith(".pth")}
    return {file for file in files | mapped_files() if os.path.isabs(file) and not file.startswith(_IN_MEMORY)}


def mapped_files() -> set[str]:
    """Return the files whose code is in this process's memory: Python itself and libraries. Empty except on Linux."""
    files = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        # The fields of a line: addresses, permissions, offset, device, inode, path. An `x` marks code.
        mapped = (line.split(maxsplit=5) for line in maps)
        files |= {fields[5].rstrip("\n") for fields in mapped if len(fields) > 5 and "x" in fields[1]}
    return files


def _origin(module: ModuleType) -> str | None:
    spec = getattr(module, "__spec__", None)
    # Built-in and frozen modules have no location.
    if isinstance(spec, ModuleSpec):
        return spec.origin if spec.has_location else None
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else None


def _stats_since(files: Iterable[str], began: float) -> tuple[Stat | Absent, ...] | None:
    """Return a `Stat` of each file; None if a file was changed after `began`, the time at which the process began."""
    stats = tuple(map(_stat, sorted(files)))
    # An absent file has no times.
    return None if any(max(stat[3:], default=0) >= began * 1e9 for stat in stats) else stats


def _stat(file: str) -> Stat | Absent:
    try:
        return stat_of(file)
    except NotADirectoryError:  # it is within an archive, which is a file
        archive = _stat(os.path.dirname(file))
        return (file, *archive[1:]) if len(archive) > 1 else (file,)
    except OSError:
        return (file,)


def place_of(name: str) -> str | None:
    """Return the path at which an import finds a module, or found it if it is loaded; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module without a spec
        return None
    return None if spec is None else spec.origin


def _files(folder: str, endings: tuple[str, ...] = ("",), but: str = "") -> list[Stat]:
    """Return all files below a folder that have any of the endings. Folders called `but` and compiled Python are
    skipped."""
    found, folders = [], [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    if entry.name not in ("__pycache__", but):
                        folders.append(entry.path)
                # A library may have a version behind its suffix, as in libcudart.so.12.
                elif entry.name.endswith(endings) or ".so." in entry.name:
                    found.append(stat_of(entry.path))
    return found
