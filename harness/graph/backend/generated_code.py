"""A hash of the code that Inductor and Triton generated, equal for two traces of a step on every GPU.

The graph's own hash does not cover that code: another release, another heuristic, or autotuning may generate other
kernels for the same graph, with other bits.

Inductor writes its calls and every Triton kernel as Python, and CPU kernels as strings in that Python. The hash leaves
out parts that differ between traces but change no bit of a result:

1. comments: they name the temporary folder, its files, and the order in which graphs were compiled;
2. the temporary folder, wherever else it is named;
3. the index of the target device: each rank compiles for its own;
4. the numbers of data-dependent symbols, which a process never resets: they are renumbered by appearance.
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
"""Patterns for a device in generated code; {0} is its index."""

_SYMBOL = re.compile(r"\bu\d+\b")

_COMMENT = re.compile(r"^\s*# .*$", re.MULTILINE)
"""A comment line, also in code within strings. C++ has `#include`, without a space."""

_KERNEL = re.compile(r"^(\w+) = async_compile\.(?:cpp_pybinding|triton)\(", re.MULTILINE)
_CALL = re.compile(r"^\s+(\w+?)(?:\.run)?\(", re.MULTILINE)


def hash_generated(folder: Path, index: int | None = None) -> str:
    """Return a hash of the generated code in a folder, which does not depend on the GPU or on the names of files.

    `index` is the index of the GPU for which the code was generated, or None.
    """
    sources = sorted(_normalized(file.read_text(), folder, index) for file in folder.rglob("*.py"))
    # Sorted by content: file names differ between traces.
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def count_launches(folder: Path) -> int:
    """Return how many kernel launches the generated code in a folder has.

    Only CPU and Triton kernels that this code defines count, not torch's own kernels.
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
