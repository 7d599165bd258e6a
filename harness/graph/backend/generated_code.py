"""A name for the code that Inductor and Triton generated: two traces of one step have one, on every GPU.

A graph's own hash says nothing of it. Another release, another heuristic, or a choice that was made by timing kernels
gives other kernels for the same graph, and other bits.

Inductor writes its calls and every Triton kernel as Python, and kernels for the CPU as text within. Left out is what
changes no bit and is not the same twice:

1. comments, which name the temporary folder and the files in it, and the order in which graphs were compiled;
2. that folder, wherever else it is named;
3. the index of the device that is compiled for: each rank compiles for its own;
4. how symbols of sizes that depend on data are numbered: a process counts on. They are numbered as they appear.
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
"""How generated code names a device."""

_SYMBOL = re.compile(r"\bu\d+\b")

_COMMENT = re.compile(r"^\s*# .*$", re.MULTILINE)
"""A line of comment, in code that is text within code too. C++ says `#include`, without a space."""

_KERNEL = re.compile(r"^(\w+) = async_compile\.(?:cpp_pybinding|triton)\(", re.MULTILINE)
_CALL = re.compile(r"^\s+(\w+?)(?:\.run)?\(", re.MULTILINE)


def hash_generated(folder: Path, index: int | None = None) -> str:
    """The hash of the code in a folder, whatever its files are called. `index` is that of the GPU it is for."""
    sources = sorted(_decisive(file.read_text(), folder, index) for file in folder.rglob("*.py"))
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def count_launches(folder: Path) -> int:
    """How often the code in a folder launches a kernel that it defines, for the CPU or in Triton; not torch's own."""
    launches = 0
    for source in (file.read_text() for file in folder.rglob("*.py")):
        kernels = set(_KERNEL.findall(source))
        launches += sum(called in kernels for called in _CALL.findall(source))
    return launches


def _decisive(source: str, folder: Path, index: int | None) -> str:
    source = _COMMENT.sub("", source.replace(str(folder), ""))
    for pattern in _INDEX if index is not None else ():
        source = re.sub(pattern.format(index), "0", source)
    numbers: dict[str, str] = {}
    return _SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"u{len(numbers)}"), ast.unparse(ast.parse(source)))
