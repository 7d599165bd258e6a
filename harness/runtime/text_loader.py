"""Import hook that compiles modules from their text. It neither reads nor writes bytecode.

Python itself uses bytecode if the source file has the same size and the same time in whole seconds. So it may run old
code after an edit within a second, or after `cp -p`, rsync or tar.

The hook leaves modules of Python's installation to Python, except bitproof's own. `harness/runtime/sources.py` checks
their bytecode before a result is cached.
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
"""The sha256 of the text that this process ran as a module, by the module's file. The file may have changed since."""

not_found: set[str] = set()
"""Top-level modules that this process searched for, and that Python's own finder did not find."""


class TextLoader(SourceFileLoader):
    """Loads a module by compiling the text of its file."""

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path)
        text_digests[self.path] = hashlib.sha256(text).hexdigest()
        return self.source_to_code(text, self.path)


class TextFinder:
    """A finder for `sys.meta_path` that finds modules like Python's own, but loads them by a TextLoader."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # For modules of Python's installation, too: None would make Python's own finder search for them again.
        spec = PathFinder.find_spec(name, path, target)
        if spec is None and path is None:
            not_found.add(name)
        # Exactly this class: another loader may transform the text.
        if spec is not None and spec.origin is not None and type(spec.loader) is SourceFileLoader:
            is_own = name.partition(".")[0] == OWN
            if is_own or not spec.origin.startswith(_installed()):
                spec.loader = TextLoader(spec.name, spec.origin)
        return spec


def claim() -> None:
    """Install the hook: from now on, load all modules outside of Python's installation by a TextLoader."""
    if TextFinder not in sys.meta_path:
        _installed()  # this imports: from 3.13 on, a call during that import would see half of it
        # Right before Python's own finder, so that the finders of other tools keep their precedence.
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, TextFinder)


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
