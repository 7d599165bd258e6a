"""A hash of the code that Inductor and Triton generated, which is equal for two traces of a step on any GPU.

The hash of the graph does not cover generated code. For example, another release may generate other kernels, and so
other bits, for the same graph.

The hash leaves out parts that differ between traces without an effect on the bits:

1. Comments, which name temporary files and the order of compilation.
2. The temporary folder.
3. The index of the GPU.
4. The numbers of data-dependent symbols, which a process never resets. They are numbered again from the code's start.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

_INDEX = (
    r"(?<=\bcuda:){0}\b",
    r"(?<=\btype='cuda', index=){0}\b",
    r"(?<=\bget_raw_stream\(){0}(?=\))",
    r"(?<=stream){0}\b",
    r"(?<=DeviceGuard\(){0}(?=\))",
    r"(?<=\bset_device\(){0}(?=\))",
)
"""Patterns for a device in generated code. {0} is its index."""

_SYMBOL = re.compile(r"\bu\d+\b")

_COMMENT = re.compile(r"^\s*# .*$", re.MULTILINE)
"""A comment line. In strings with C++ code, `#include` has no space after `#`, so it is no match."""

_KERNEL = re.compile(r"^(\w+) = async_compile\.(?:cpp_pybinding|triton)\(", re.MULTILINE)
_CALL = re.compile(r"^\s+(\w+?)(?:\.run)?\(", re.MULTILINE)


def hash_generated(folder: Path, index: int | None = None) -> str:
    """Return a hash of the generated code in a folder, which depends neither on the GPU nor on file names.

    `index` is the index of the GPU for which the code was generated, or None.
    """
    sources = sorted(_normalized(file.read_text(), folder, index) for file in folder.rglob("*.py"))
    # Sorted by content: file names differ between traces.
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def count_launches(folder: Path) -> int:
    """Return the number of kernel launches in the generated code in a folder.

    Only CPU and Triton kernels that this code defines are counted, not torch's own kernels.
    """
    launches = 0
    for source in (file.read_text() for file in folder.rglob("*.py")):
        # A wrapper file defines its kernels by these assignments and calls them by name.
        kernels = set(_KERNEL.findall(source))
        launches += sum(called in kernels for called in _CALL.findall(source))
    return launches


def _normalized(source: str, folder: Path, index: int | None) -> str:
    # Comment lines are removed first, since parsing keeps those in strings, such as C++ kernels.
    source = _COMMENT.sub("", source.replace(str(folder), ""))
    for pattern in _INDEX if index is not None else ():
        source = re.sub(pattern.format(index), "0", source)
    # Two traces give a data-dependent size different numbers, but mention the sizes in the same order.
    numbers: dict[str, str] = {}
    return _SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"u{len(numbers)}"), ast.unparse(ast.parse(source)))
