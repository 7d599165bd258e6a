"""Modules run what their files say: bytecode is believed by the text that it was compiled from, never by size and time.

Python believes compiled code if the file that it came from has the same size and the same time in whole seconds. An
edit within a second, or one whose time was put back as `cp -p`, rsync and tar do, then runs the code from before it.
Here bytecode needs the hash of the very text (PEP 552), which is looked at whatever its flags say; it is written so as
well. What Python's installation holds is read as ever, apart from our own package: who keeps a result looks at the
compiled files of the rest too (harness/runtime/sources.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import marshal
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

OWN = "bitproof"
_HEADER_BYTES = 16
_CHECKED_HASH = (0b11).to_bytes(4, "little")
_EARLY_FORM = 2
_MAY_LACK_A_FORM = sys.version_info >= (3, 14)

code_digests: dict[str, str] = {}
"""By file, the sha256 of the code that this process ran as a module of it."""

text_digests: dict[str, str] = {}
"""By file, the sha256 of the text that code is of: what the file holds by now may be another one."""

not_found: set[str] = set()
"""Packages and modules that this process looked for, and Python's own finder has none of."""


class TextLoader(SourceFileLoader):
    """Runs the text of a file, compiled by now or before."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file's text; its digest stands in `code_digests` from now on."""
        path = self.get_filename(fullname)
        text = self.get_data(path)
        code, compiled = self._compiled(path, text)
        code_digests[path] = hashlib.sha256(compiled).hexdigest()
        text_digests[path] = hashlib.sha256(text).hexdigest()
        return code

    def digest(self) -> str:
        """The sha256 of the code that would run now, of a module that need not be loaded."""
        return hashlib.sha256(self._compiled(self.path, self.get_data(self.path))[1]).hexdigest()

    def ran_text(self) -> bool:
        """Whether the code that ran is what the text compiles to: forged bytecode names its hash too."""
        code = _canonical(self.source_to_code(self.get_data(self.path), self.path))
        digests = {hashlib.sha256(code).hexdigest()}
        if (read := self._read(self.get_data(self.path))[0]) is not None and _canonical(read[0]) == code:
            digests.add(hashlib.sha256(read[1]).hexdigest())  # another process wrote it, in another form
        return code_digests.get(self.path) in digests

    def _compiled(self, path: str, text: bytes) -> tuple[CodeType, bytes]:
        read, cached = self._read(text)
        if read is not None:
            return read
        code = self.source_to_code(text, path)
        compiled = _canonical(code)
        if cached is not None and not sys.dont_write_bytecode:
            loadable = marshal.dumps(code) if _MAY_LACK_A_FORM else compiled
            self.set_data(cached, _header(text) + loadable)  # fails without a word where it may not
        return code, compiled

    def _read(self, text: bytes) -> tuple[tuple[CodeType, bytes] | None, str | None]:
        """The compiled code of the text, if there is some to believe, and where it belongs."""
        cached, header = None, _header(text)
        with contextlib.suppress(OSError, NotImplementedError, ValueError, EOFError, TypeError):
            cached = importlib.util.cache_from_source(self.path)
            content = self.get_data(cached)
            if _without_flags(content) == _without_flags(header) and content[4] & 1:
                compiled = content[_HEADER_BYTES:]
                code = marshal.loads(compiled)
                if isinstance(code, CodeType) and code.co_filename == self.path:
                    return (code, _canonical(code) if _MAY_LACK_A_FORM else compiled), cached
        return None, cached


class TextFinder:
    """A finder of sys.meta_path that finds what Python's own would, with a loader that runs the text."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's place; None where it is not found. A module of Python's installation keeps its loader.

        Its place is returned all the same: Python's own finder, asked next, would search for it once more.
        """
        spec = PathFinder.find_spec(name, path, target)
        if spec is None and path is None:
            not_found.add(name)
        is_own = name.partition(".")[0] == OWN
        return by_text(spec) if spec and spec.origin and (is_own or not _is_installed(spec.origin)) else spec


def by_text(spec: ModuleSpec | None) -> ModuleSpec | None:
    """The same place, with a loader that runs the text where one runs Python."""
    if spec is not None and type(spec.loader) is SourceFileLoader and spec.origin is not None:
        spec.loader = TextLoader(spec.name, spec.origin)
    return spec


def claim() -> None:
    """From now on, run the text of what this process imports and Python's installation does not hold."""
    if TextFinder not in sys.meta_path:
        _installed()  # which imports: from 3.13 on, asking for it during that import finds half of it
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, TextFinder)


def _is_installed(file: str) -> bool:
    return file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    return tuple({paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _header(text: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(text)


def _without_flags(header: bytes) -> tuple[bytes, bytes]:
    return header[:4], header[8:_HEADER_BYTES]


def _canonical(code: CodeType) -> bytes:
    """Code as bytes that do not depend on what else the process has loaded.

    Later forms mark each object that has other references. This one has no slices, which are constants from
    Python 3.14 on: each becomes a tuple that begins with StopIteration, which has a form and is no text's constant.
    """
    return marshal.dumps(_without_slices(code) if _MAY_LACK_A_FORM else code, _EARLY_FORM)


def _without_slices(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_without_slices(constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(map(_without_slices, constant))
    return (StopIteration, constant.start, constant.stop, constant.step) if isinstance(constant, slice) else constant
