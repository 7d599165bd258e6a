"""Import hook: compiles modules from their text; their bytecode is neither read nor written.

Python runs a module's bytecode if the source has the size and the time, in whole seconds, that it had when it was
compiled. After an edit within a second, or after `cp -p`, rsync or tar restored the time, it runs the old code.

Only Python's installation is loaded as usual, except for our own package: before a result is kept, the bytecode of all
other modules is checked too (harness/runtime/sources.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

OWN = "bitproof"

text_digests: dict[str, str] = {}
"""The sha256 of the source text that this process ran as a module, by the module's file. The file may have changed
since."""

not_found: set[str] = set()
"""Packages and modules that this process searched, and that Python's own finder did not find."""


class TextLoader(SourceFileLoader):
    """Compiles a module's text."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the file's text, whose digest is in `text_digests` from now on."""
        text = self.get_data(self.path)
        text_digests[self.path] = hashlib.sha256(text).hexdigest()
        return self.source_to_code(text, self.path)


class TextFinder:
    """A finder for sys.meta_path that finds the same modules as Python's own, with a loader that runs the text."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec; None if it is not found. A module of Python's installation keeps its loader.

        Its spec is returned all the same: Python's own finder, asked next, would search for it again.
        """
        spec = PathFinder.find_spec(name, path, target)
        if spec is None and path is None:
            not_found.add(name)
        if spec is not None and spec.origin is not None and type(spec.loader) is SourceFileLoader:
            is_own = name.partition(".")[0] == OWN
            if is_own or not spec.origin.startswith(_installed()):
                spec.loader = TextLoader(spec.name, spec.origin)
        return spec


def claim() -> None:
    """From now on, run the text of all imports outside Python's installation."""
    if TextFinder not in sys.meta_path:
        _installed()  # this imports: from 3.13 on, a call during that import would see half of it
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, TextFinder)


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
