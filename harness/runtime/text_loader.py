"""Import hook: validates cached bytecode by the source's hash (PEP 552), never by mtime and size.

Python itself accepts bytecode if the source file has the same size and the same time in whole seconds. So it may run
old code after an edit within a second, or after `cp -p`, rsync or tar.

- Bytecode must have the hash of the exact text, even if its flags say that this need not be checked.
- New bytecode is written with the hash.
- Modules of Python's installation are left to Python, except bitproof's own. Their compiled files are checked before a
  result is kept (harness/runtime/sources.py).
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
# From 3.14 on code may have slices as constants, which marshal's early form cannot represent.
_MAY_LACK_A_FORM = sys.version_info >= (3, 14)

code_digests: dict[str, str] = {}
"""The sha256 of the code that this process ran as a module, by the module's file."""

text_digests: dict[str, str] = {}
"""The sha256 of the source text that this process ran as a module, by the module's file. The file may have changed
since."""

not_found: set[str] = set()
"""Packages and modules that this process searched, and that Python's own finder did not find."""


class TextLoader(SourceFileLoader):
    """Loads a module by running the code that its file's text compiles to, from valid bytecode if there is any."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file's text. Also adds its digest to `code_digests`, and the text's to `text_digests`."""
        path = self.get_filename(fullname)
        text = self.get_data(path)
        code, compiled = self._compiled(path, text)
        code_digests[path] = hashlib.sha256(compiled).hexdigest()
        text_digests[path] = hashlib.sha256(text).hexdigest()
        return code

    def digest(self) -> str:
        """The sha256 of the code that would run now. The module need not be loaded."""
        return hashlib.sha256(self._compiled(self.path, self.get_data(self.path))[1]).hexdigest()

    def ran_text(self) -> bool:
        """Whether the code that ran equals the code that the text compiles to. Forged bytecode may have the right
        hash."""
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
            self.set_data(cached, _header(text) + loadable)  # does nothing if the file cannot be written
        return code, compiled

    def _read(self, text: bytes) -> tuple[tuple[CodeType, bytes] | None, str | None]:
        """The cached code of `text` and its bytes; None if there is no valid cached code. Then the path of the cache
        file; None if there is no such path."""
        cached, header = None, _header(text)
        with contextlib.suppress(OSError, NotImplementedError, ValueError, EOFError, TypeError):
            cached = importlib.util.cache_from_source(self.path)
            content = self.get_data(cached)
            # Bit 0 of the flags marks a file that is validated by a hash, and not by time and size.
            if _without_flags(content) == _without_flags(header) and content[4] & 1:
                compiled = content[_HEADER_BYTES:]
                code = marshal.loads(compiled)
                if isinstance(code, CodeType) and code.co_filename == self.path:
                    return (code, _canonical(code) if _MAY_LACK_A_FORM else compiled), cached
        return None, cached


class TextFinder:
    """A finder for sys.meta_path. It finds the same modules as Python's own finder, but loads them by a TextLoader."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A module's spec; None if the module is not found.

        Modules of Python's installation are found here too, but keep their usual loader: if this returned None for
        them, Python's own finder would search for them again.
        """
        spec = PathFinder.find_spec(name, path, target)
        if spec is None and path is None:
            not_found.add(name)
        is_own = name.partition(".")[0] == OWN
        return by_text(spec) if spec and spec.origin and (is_own or not spec.origin.startswith(_installed())) else spec


def by_text(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Give the spec a TextLoader if the module is Python source; returns the spec."""
    if spec is not None and type(spec.loader) is SourceFileLoader and spec.origin is not None:
        spec.loader = TextLoader(spec.name, spec.origin)
    return spec


def claim() -> None:
    """From now on, load all modules outside of Python's installation by a TextLoader."""
    if TextFinder not in sys.meta_path:
        _installed()  # this imports: from 3.13 on, a call during that import would see half of it
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, TextFinder)


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _header(text: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(text)


def _without_flags(header: bytes) -> tuple[bytes, bytes]:
    return header[:4], header[8:_HEADER_BYTES]


def _canonical(code: CodeType) -> bytes:
    """Code as bytes that are equal for equal code, whatever other objects exist in the process.

    Python's later formats of marshal lack this property. The early format lacks slices, so each slice is replaced by a
    tuple.
    """
    return marshal.dumps(_without_slices(code) if _MAY_LACK_A_FORM else code, _EARLY_FORM)


def _without_slices(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_without_slices(constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(map(_without_slices, constant))
    # marshal supports StopIteration, and no source text can have it as a constant.
    return (StopIteration, constant.start, constant.stop, constant.step) if isinstance(constant, slice) else constant
